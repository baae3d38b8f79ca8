"""Attention over packed keys and values by the native library: csrc/attention.h.

``softmax(Q K^T) V`` with keys and values read from their codes, a block and head at a time, by an online
softmax; tail, sinks and the newest tokens are read as they are. It equals attention over
`CompressedLayer.read`.
"""

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...quant.operand import Operand
from ..addresses import BlockAddresses
from ..backend import LayerAttention, uncoded
from ..call import AttentionCall
from ..rope import RopeTable, Within
from . import library as native

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot read packed keys and values of a layer; empty where it can."""
    view = codec.view
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    if view.dtype not in native.DTYPES:
        return f"{view.dtype} states"
    if view.head_size % 32 or block % 32:
        return f"heads of {view.head_size} in blocks of {block}: both must be multiples of 32"
    if not codec.rotated and view.rotary_size != view.head_size:
        return "the rotary embedding turns a part of a head"
    if why := uncoded(codec, block):
        return why
    keys, values = (segment.operand(block) for segment in codec.segments)
    assert isinstance(keys, Operand) and isinstance(values, Operand)
    if codec.offset is not None and keys.per_token:
        return "a key bias beside ranges per token"
    return _unfit_operand(keys, "key", block) or _unfit_operand(values, "value", block)


def _unfit_operand(operand: Operand, role: str, block: int) -> str:
    if operand.levels is not None and operand.bits > 4:
        return f"a table of {2**operand.bits} levels for {role}s"
    size, tokens = operand.group, not operand.per_token
    # The kernel reads keys by 32 tokens and 4 channels, values by all tokens and 16 channels.
    if role == "value":
        fits = size >= block if tokens else size % 16 == 0
    else:
        fits = (size % 32 == 0 or size >= block) if tokens else size % 4 == 0
    return "" if fits else f"ranges of {size} {'tokens' if tokens else 'channels'} for {role}s"


def describe(to: native.Operand, operand: Operand) -> list[Tensor]:
    """Set what does not change of a packed operand. Returns what is pointed to."""
    to.bits, to.per_token, to.group = operand.bits, operand.per_token, operand.group
    to.count_bytes, to.zero_scales = operand.count_bytes, operand.zero_scales or 0.0
    if operand.levels is None:
        return []
    levels = operand.levels.float().contiguous()
    to.levels = native.address(levels, torch.float32, 2**operand.bits)
    if operand.offline is None:
        return [levels]
    to.offline = 1
    scale, zero = (t.contiguous() for t in operand.offline)
    found = [[native.address(t, torch.float16, operand.channels)] for t in (scale, zero)]
    addresses = torch.tensor(found, dtype=torch.int64)
    to.scale, to.zero = addresses[0].data_ptr(), addresses[1].data_ptr()
    return [levels, scale, zero, addresses]


def describe_layer(call: native.Attend, codec: LayerCodec, block: int) -> list[Tensor]:
    """Set what does not change of a layer. Returns what is pointed to."""
    view = codec.view
    call.block, call.kv_heads, call.head_size = block, view.kv_heads, view.head_size
    call.group_heads = view.query_heads // view.kv_heads
    constant: list[Tensor] = []
    for to, segment in zip((call.key, call.value), codec.segments, strict=True):
        operand = segment.operand(block)
        assert isinstance(operand, Operand)
        constant += describe(to, operand)
    if codec.offset is not None:
        offset = codec.offset.float().contiguous()
        constant.append(offset)
        call.key.offset = native.address(offset, torch.float32, view.kv_width)
    turn = codec.turns[1]
    if turn is not None:
        turn = turn.contiguous()
        constant.append(turn)
        call.value_turn = turn.data_ptr()
        call.value_turn_head = 0 if turn.dim() == 2 else turn.stride(0)
    return constant


def turned(query: Tensor, turn: Tensor) -> Tensor:
    """Queries ``[B, H, t, D]`` times the matrix ``[D, D]`` of keys, or ``[G, D, D]``."""
    heads = query.float().unflatten(1, (1 if turn.dim() == 2 else len(turn), -1))
    own = turn if turn.dim() == 2 else turn[:, None]
    return (heads @ own.mT).flatten(1, 2).to(query.dtype)


def rope_table(within: Within) -> Tensor:
    """The angles of the places of a block as the library takes them, made once."""
    if "cpu" not in within.prepared:
        within.prepared["cpu"] = native.rope_table(*within.angles)
    table: Tensor = within.prepared["cpu"]
    return table


class NativeAttention(LayerAttention):
    """Attends over one layer."""

    def __init__(self, layer: "CompressedLayer", isa: str, rope: RopeTable) -> None:
        self._layer, self._rope = layer, rope
        library = native.library()
        assert library is not None
        self._function = getattr(library, f"xq_attend_{isa}")
        self._addresses = BlockAddresses(layer.stream)
        self._call = native.Attend()
        self._constant = describe_layer(self._call, layer.codec, layer.stream.block)

    def _refresh(self) -> None:
        """Point to the blocks as they are now."""
        addresses, call = self._addresses, self._call
        if not addresses.refresh():
            return
        if addresses.table is None:
            return
        self._fields = [addresses.fields(number) for number in range(2)]
        for to, fields in zip((call.key, call.value), self._fields, strict=True):
            for name, blocks in fields.items():
                setattr(to, name, blocks.data_ptr())
        self._table = addresses.table.int()
        call.lengths, call.table = addresses.lengths.data_ptr(), self._table.data_ptr()
        call.table_stride = addresses.columns

    def attend(self, call: AttentionCall) -> Tensor | None:
        if not call.is_plain:
            return None
        layer, to = self._layer, self._call
        query, key, value, mask, scaling, softcap, sink_logits = call
        batch, heads, queries, size = query.shape
        stream = layer.stream
        past = layer.tokens - queries
        limit = min(stream.tokens, past)
        before = past - limit  # of the tail, older than these queries
        angles = None
        if not layer.codec.rotated:
            columns = None if layer.sinks is None else layer.sinks.columns
            angles = self._rope.of(stream.lengths, stream.block, before, columns)
            if angles is None:
                return None
        self._refresh()
        turn = layer.codec.turns[0]
        if turn is not None:
            query, turned_query = torch.stack([query, turned(query, turn)])
            to.turned_query = turned_query.data_ptr()
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        out = torch.empty(batch, queries, heads, size, dtype=query.dtype)
        limits = torch.full((batch,), limit, dtype=torch.int32)
        to.batch, to.queries, to.limits = batch, queries, limits.data_ptr()
        to.dtype = native.DTYPES[query.dtype]
        to.query, to.out = query.data_ptr(), out.data_ptr()
        to.query_batch, to.query_head, to.query_token = query.stride()[:3]
        to.out_batch, to.out_token, to.out_head = out.stride()[:3]
        to.scaling, to.softcap = scaling, softcap or 0.0
        to.sink_logits = None
        if sink_logits is not None:
            sink_logits = sink_logits.float().contiguous()
            to.sink_logits = native.address(sink_logits, torch.float32, heads)
        to.mask = None
        if mask is not None:
            to.mask = mask.data_ptr()
            to.mask_dtype = native.DTYPES[mask.dtype]
            strides = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
            to.mask_batch, _, to.mask_query, to.mask_token = strides
        if angles is not None:
            to.rope_table = rope_table(angles.within).data_ptr()
            to.start_cos, to.start_sin = (t.data_ptr() for t in angles.start)
            to.start_batch = angles.start[0].stride(0)
        count = 0
        if before:
            tail = layer.tail
            assert tail is not None
            self._rows(to.exact[0], tail, before, angles and angles.tail, limit)
            count = 1
        if layer.sinks is not None:
            kept, rows = to.exact[count], layer.sinks.rows
            self._rows(kept, rows, rows.shape[1], angles and angles.sinks, 0)
            kept.column = layer.sinks.columns.data_ptr()
            count += 1
        own = to.exact[count]
        own.key, own.value = key.data_ptr(), value.data_ptr()
        own.cos = own.sin = own.column = None
        own.batch_stride, own.head_stride, own.token_stride = key.stride()[:3]
        own.dtype, own.count = native.DTYPES[key.dtype], queries
        own.start, own.causal = past, 1
        to.exact_count = count + 1
        to.threads = torch.get_num_threads()
        if self._function(ctypes.byref(to)):
            raise MemoryError("not enough memory to attend over the packed cache")
        return out

    def _rows(self, kept: native.Exact, rows: Tensor, count: int, angles: Any, start: int) -> None:
        width = self._layer.codec.view.kv_width
        kept.key = rows.data_ptr()
        kept.value = kept.key + width * rows.element_size()
        kept.cos, kept.sin = (t.data_ptr() for t in angles) if angles else (None, None)
        kept.column = None
        kept.batch_stride, kept.token_stride = rows.stride()[:2]
        kept.head_stride = self._layer.codec.view.head_size
        kept.dtype, kept.count = native.DTYPES[rows.dtype], count
        kept.start, kept.causal = start, 0

"""Attention over packed keys and values by the native library: csrc/attention.h.

``softmax(Q K^T) V`` with keys and values read from their codes, a block and head at a time, by an online
softmax; tail, sinks and the newest tokens are read as they are. It equals attention over
`CompressedLayer.read`.
"""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...models import AttentionView
from ...quant.operand import Operand
from ..addresses import BlockAddresses
from ..backend import LayerAttention, uncoded
from ..call import AttentionCall
from ..rope import RopeTable, Within
from . import library as native
from .exact import ExactTokens

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot read packed keys and values of a layer; empty where it can."""
    view = codec.view
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    if view.dtype not in native.DTYPES:
        return f"{view.dtype} states"
    if view.head_size % 8 or block % 32:
        return f"heads of {view.head_size} in blocks of {block}: multiples of 8 and of 32 are read"
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
    # The kernel reads keys by 32 tokens and 4 channels, values by all tokens.
    if role == "value":
        fits = size >= block or not tokens
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
    addresses = torch.tensor(found, dtype=torch.int64, device="cpu")
    to.scale, to.zero = addresses[0].data_ptr(), addresses[1].data_ptr()
    return [levels, scale, zero, addresses]


def describe_heads(call: native.Attend, view: AttentionView, block: int) -> None:
    """Set how many heads there are, of how many channels, and the tokens of a block."""
    call.block, call.kv_heads, call.head_size = block, view.kv_heads, view.head_size
    call.group_heads = view.query_heads // view.kv_heads


def describe_layer(call: native.Attend, codec: LayerCodec, block: int) -> list[Tensor]:
    """Set what does not change of a layer. Returns what is pointed to."""
    describe_heads(call, codec.view, block)
    constant: list[Tensor] = []
    for to, segment in zip((call.key, call.value), codec.segments, strict=True):
        operand = segment.operand(block)
        assert isinstance(operand, Operand)
        constant += describe(to, operand)
    if codec.offset is not None:
        offset = codec.offset.float().contiguous()
        constant.append(offset)
        call.key.offset = native.address(offset, torch.float32, codec.view.kv_width)
    turn = codec.turns[1]
    if turn is not None:
        turn = turn.contiguous()
        constant.append(turn)
        call.value_turn = native.address(turn, torch.float32, *turn.shape)
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

    reads_chunks = True

    def __init__(self, layer: "CompressedLayer", isa: str, rope: RopeTable) -> None:
        self._layer, self._rope = layer, rope
        library = native.library()
        assert library is not None
        self._function = getattr(library, f"xq_attend_{isa}")
        self._addresses = BlockAddresses(layer.stream)
        self._call = native.Attend()
        self._constant = describe_layer(self._call, layer.codec, layer.stream.block)
        self._exact = ExactTokens(self._call, layer)

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
        layer, to = self._layer, self._call
        fitted = call.fitted(layer)
        if fitted is None:
            return None
        call, query, stream = fitted, fitted.query, layer.stream
        batch, heads, queries, size = query.shape
        before = max(layer.tokens - queries - stream.tokens, 0)  # of the tail
        angles = None
        if not layer.codec.rotated:
            columns = None if layer.sinks is None else layer.sinks.columns
            angles = self._rope.of(stream.lengths, stream.block, before, columns)
            if angles is None:
                return None
            to.rope_table = rope_table(angles.within).data_ptr()
            to.start_cos, to.start_sin = (
                native.address(t, torch.float32, *angles.start[0].shape) for t in angles.start
            )
            to.start_batch = angles.start[0].stride(0)
        self._refresh()
        tail = layer.tail if before else None
        sinks = None if layer.sinks is None else layer.sinks.rows
        exact = None if angles is None else (angles.tail, angles.sinks)
        kept = self._exact.point(call, before, tail, sinks, exact)
        query = query if query.stride(-1) == 1 else query.contiguous()
        turn = layer.codec.turns[0]
        if turn is not None:
            query, turned_query = torch.stack([query, turned(query, turn)])
            to.turned_query = turned_query.data_ptr()
        out = query.new_empty(batch, queries, heads, size)
        to.dtype, to.scaling = native.DTYPES[query.dtype], call.scaling
        to.query, to.out = query.data_ptr(), out.data_ptr()
        to.query_batch, to.query_head, to.query_token = query.stride()[:3]
        to.out_batch, to.out_token, to.out_head = out.stride()[:3]
        if self._function(ctypes.byref(to)):
            raise MemoryError("not enough memory to attend over the packed cache")
        del kept  # the library has read it
        return out

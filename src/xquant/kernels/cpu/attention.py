"""Attention over packed keys and values by the native library: one layer's side of the C interface."""

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...quant import Codebook, Ragged, Segment
from ..call import Newest
from ..rope import AngleBook
from . import library as native

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

MOST_QUERIES = 16
"""Queries at a time that the kernel answers; more are a prefill, which pays for rebuilding K and V once."""


class PackedAttention:
    """Attends over one layer. Holds addresses, so it is never copied with the cache."""

    def __init__(self, layer: "CompressedLayer", path: str, book: AngleBook) -> None:
        self._layer, self._book = layer, book
        native_library = native.library()
        assert native_library is not None
        self._function = getattr(native_library, f"xq_attend_{path}")
        view = layer.codec.view
        self._call = call = native.Attend()
        self._kept: list[Any] = []  # what the call points to
        self._version = -1
        call.block = layer.stream.block
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        call.group_heads = view.query_heads // view.kv_heads
        keys, values = layer.codec.segments
        self._constant = [
            self._describe(call.key, keys, layer.stream.block),
            self._describe(call.value, values, layer.stream.block),
        ]
        offset = getattr(layer.codec, "offset", None)
        if offset is not None:
            offset = offset.float().contiguous()
            self._constant.append(offset)
            call.key.offset = native.address(offset, torch.float32, keys.channels)

    def _describe(self, side: native.Operand, segment: Segment, block: int) -> list[Tensor]:
        quantizer: Any = segment.quantizer
        side.bits = quantizer.bits
        side.per_token = quantizer.per == "token"
        side.group = quantizer.range_size(segment.channels if side.per_token else block)
        if not isinstance(quantizer, Codebook):
            return []
        levels = quantizer.levels.float().contiguous()
        side.levels = native.address(levels, torch.float32, 2**quantizer.bits)
        kept = [levels]
        ranges = quantizer.offline_ranges()
        if ranges is not None:
            side.offline = 1
            scale, zero = (t.contiguous() for t in ranges)
            found = [[native.address(t, torch.float16, segment.channels)] for t in (scale, zero)]
            addresses = torch.tensor(found, dtype=torch.int64)
            side.scale, side.zero = addresses[0].data_ptr(), addresses[1].data_ptr()
            kept += [scale, zero, addresses]
        return kept

    def _refresh(self) -> None:
        """Point to the blocks as they are now."""
        call, stream = self._call, self._layer.stream
        self._version = stream.version
        call.columns = len(stream.lengths)
        self._kept = []
        if stream.table is None:
            return
        pools = zip((call.key, call.value), stream.segments, stream.pool, strict=True)
        lender = stream.lender
        for number, (side, segment, pool) in enumerate(pools):
            fields = dict(pool)
            if segment.borrows:
                assert lender is not None
                fields["codes"] = lender.pool[number]["codes"]
            for name, blocks in fields.items():
                addresses = blocks.addresses
                self._kept.append(addresses)
                setattr(side, name, addresses.data_ptr())
                if name == "outlier_count":
                    assert not isinstance(blocks, Ragged)
                    side.count_bytes = blocks.itemsize
        lengths = torch.tensor(stream.lengths, dtype=torch.int32)
        table = stream.table.contiguous()
        self._kept += [lengths, table]
        call.lengths, call.table = lengths.data_ptr(), table.data_ptr()

    def attend(self, newest: Newest) -> Tensor | None:
        """Attention of the newest tokens over the store, their own past and themselves: ``[B, t, H, D]``, or
        None where the reference must answer."""
        layer, call = self._layer, self._call
        query, key, value, mask, scaling, softcap = newest
        batch, heads, queries, size = query.shape
        if not newest.masked_plainly:
            return None
        stream = layer.stream
        past = layer.get_seq_length() - queries
        limit = min(stream.tokens, past)
        before = past - limit  # of the tail, older than these queries
        angles = None
        if not layer.codec.rotated:
            angles = self._book.of(stream.lengths, stream.block, before, layer.sink_at)
            if angles is None:
                return None
        if stream.version != self._version:
            self._refresh()
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        out = torch.empty(batch, queries, heads, size, dtype=query.dtype)
        call.batch, call.queries, call.limit = batch, queries, limit
        call.dtype = native.DTYPES[query.dtype]
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.query_batch, call.query_head, call.query_token = query.stride()[:3]
        call.out_batch, call.out_token, call.out_head = out.stride()[:3]
        call.scaling, call.softcap = scaling, softcap or 0.0
        call.mask = None
        if mask is not None:
            call.mask = mask.data_ptr()
            call.mask_dtype = native.DTYPES[mask.dtype]
            strides = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
            call.mask_batch, _, call.mask_query, call.mask_token = strides
        if angles is not None:
            call.rope_table = angles.turn.data_ptr()
            call.start_cos, call.start_sin = (t.data_ptr() for t in angles.start)
        count = 0
        if before:
            tail = layer.tail
            assert tail is not None
            self._rows(call.exact[0], tail, before, angles and angles.tail, limit)
            count = 1
        if layer.sinks is not None and layer.sink_at is not None:
            kept = call.exact[count]
            self._rows(kept, layer.sinks, layer.sinks.shape[1], angles and angles.sinks, 0)
            kept.column = layer.sink_at.data_ptr()
            count += 1
        own = call.exact[count]
        own.key, own.value = key.data_ptr(), value.data_ptr()
        own.cos = own.sin = own.column = None
        own.batch_stride, own.head_stride, own.token_stride = key.stride()[:3]
        own.dtype, own.count = native.DTYPES[key.dtype], queries
        own.start, own.causal = past, 1
        call.exact_count = count + 1
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
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

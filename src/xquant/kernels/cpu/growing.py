"""Attention over a cache that grows by any `Kernel` of the library."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...models.rotation import Pair
from ...past.built import States
from ...past.growing_layer import CompressedLayer
from ...past.sinks import Sinks
from ..addresses import BlockAddresses
from ..backend import LayerAttention
from ..call import FLOATS, AttentionCall
from ..rebuilding import at_columns
from ..rope import BlockAngles, RopeAngles, RopeTable
from . import library as native
from .attention import Kernel

Where = tuple[int | None, int | None, int]
"""Where cos and sin of some tokens lie, fp32 ``[B, t, pairs]``, and ``pairs``."""
NOWHERE: Where = None, None, 0
"""Of keys that are rotated already."""


@dataclass
class TokenAngles:
    """Of the tail and of sinks ``[B, t, R/2]``, where blocks have no angles; as `RopeAngles`."""

    tail: Pair
    sinks: Pair
    prepared: dict[str, Any] = field(default_factory=dict)


class NativeAttention(LayerAttention):
    """Attends over one layer."""

    def __init__(self, layer: CompressedLayer, kernel: Kernel, rope: RopeTable) -> None:
        self._layer, self._kernel, self._rope = layer, kernel, rope
        self._addresses = BlockAddresses(layer.stream)
        self._limited = -1, 0
        """Tokens in blocks that each sequence reads, and how many sequences there were."""
        self._sinks: Sinks | None = None
        self._start: Pair | None = None
        self._width, self._exact = layer.codec.view.kv_width, tuple(kernel.to.exact)
        for rows in self._exact[:2]:  # of the tail and the sinks
            rows.head_stride = kernel.to.head_size
        self._exact[2].causal, kernel.to.exact_count = 1, 3
        # What keys and values are rebuilt from is decoded for a chunk of a prompt in less time.
        self.reads_chunks = layer.codec.rematerialized is None

    def attend(self, call: AttentionCall) -> Tensor | None:
        layer, to = self._layer, self._kernel.to
        fitted = call.fitted(layer)
        if fitted is None:
            return None
        call, stream, query = fitted, layer.stream, fitted.query
        batch, heads, queries, size = query.shape
        past = layer.tokens - queries
        limit = min(stream.tokens, past)
        angles: RopeAngles | TokenAngles | None = None
        if not layer.codec.rotated:
            angles = self._rope.of(layer, past - limit)
            if angles is None:
                if not self._kernel.angles_by_token:
                    return None
                angles = self._token_angles(past - limit)
        self._refresh()
        if stream.tokens:
            self._set_angles(angles)
        if (limit, batch) != self._limited:
            self._limits = torch.full((batch,), limit, dtype=torch.int32, device="cpu")
            self._limited, to.limits = (limit, batch), self._limits.data_ptr()
        to.batch, to.queries = batch, queries
        to.threads = torch.get_num_threads()
        kept = self._point_to_exact(call, past, limit, angles)
        if query.stride(3) != 1:
            call = call._replace(query=query.contiguous())
        out = query.new_empty(batch, queries, heads, size)
        self._kernel.attend(call, out)
        del kept, angles  # the library has read them
        layer.release_below()
        return out

    def _refresh(self) -> None:
        """Point to the blocks as they are now."""
        found, kernel, stream = self._addresses, self._kernel, self._layer.stream
        if not found.refresh():
            return
        kernel.columns = found.columns
        if found.table is None:
            return
        kernel.point_to_blocks([found.fields(number) for number in range(len(stream.segments))])
        self._table, to = found.table.int(), kernel.to
        to.lengths, to.table = found.lengths.data_ptr(), self._table.data_ptr()
        to.table_stride = found.columns

    def _set_angles(self, angles: RopeAngles | TokenAngles | None) -> None:
        """Tell the kernel the angles of packed keys, where they are others than before."""
        if isinstance(angles, RopeAngles):
            if angles.start is not self._start:
                self._kernel.set_angles(BlockAngles(angles.within, angles.start))
                self._start = angles.start
        elif self._kernel.angles_by_token:
            # The column of the token in each place [c * n]; past the end of a block that was cropped, of any:
            # its score is hidden.
            stream, lengths = self._layer.stream, self._addresses.lengths.long()[:, None]
            within = torch.arange(stream.block, device="cpu")
            columns = (lengths.cumsum(0) - lengths + within).flatten().clamp(max=stream.tokens - 1)
            by_channel = at_columns(columns, 2, *self._layer.index.rope_by_channel())
            self._kernel.set_angles((by_channel[0], by_channel[1]))
            self._start = None

    def _point_to_exact(
        self,
        call: AttentionCall,
        past: int,
        limit: int,
        angles: RopeAngles | TokenAngles | None,
    ) -> States:
        """Point to the tail, the sinks and the newest tokens. Returns these, as they are pointed to."""
        layer, codec, before = self._layer, self._layer.codec, past - limit
        tail, sinks, newest = self._exact
        (tail.cos, tail.sin, tail.pairs), (sinks.cos, sinks.sin, sinks.pairs) = _where(angles)
        tail.start, tail.count = limit, before
        if before:
            assert layer.tail is not None
            rows = layer.tail if codec.keeps_states else layer.built.rows(layer.tail, before)
            self._point(tail, rows)
        if layer.sinks is not self._sinks:
            self._point_to_sinks(layer.sinks)
        key, value, strides = call.key, call.value, call.key.stride()
        if strides[3] != 1 or value.stride() != strides:
            key, value = key.contiguous(), value.contiguous()
            strides = key.stride()
        newest.key, newest.value = key.data_ptr(), value.data_ptr()
        newest.batch_stride, newest.head_stride, newest.token_stride, _ = strides
        newest.dtype, newest.count = native.DTYPES[key.dtype], key.shape[2]
        newest.start = past
        return key, value

    def _point_to_sinks(self, sinks: Sinks | None) -> None:
        """To the keys and values of ``sinks``, which are built once: other sinks are another object."""
        self._sinks, to, codec = sinks, self._exact[1], self._layer.codec
        to.count = 0
        if sinks is None:
            return
        self._sink_rows = sinks.rows
        if not codec.keeps_states:
            self._sink_rows = torch.cat(codec.exact(sinks.rows.to(codec.view.dtype)), -1)
        self._point(to, self._sink_rows)
        to.count = sinks.columns.shape[1]
        to.column = native.address(sinks.columns, torch.int32, *sinks.columns.shape)

    def _point(self, to: native.Exact, rows: Tensor) -> None:
        """To ``rows`` ``[B, t, 2 G D]``, keys beside values."""
        shape = self._kernel.to.batch, rows.shape[1], 2 * self._width
        to.key = start = native.address(rows, FLOATS, *shape, rows=True)
        to.value = start + self._width * rows.itemsize
        to.batch_stride, to.token_stride, _ = rows.stride()
        to.dtype = native.DTYPES[rows.dtype]

    def _token_angles(self, before: int) -> TokenAngles:
        """Of the ``before`` tokens of the tail, and of sinks."""
        stream, sinks = self._layer.stream, self._layer.sinks
        cos, sin = (t.mT for t in self._layer.index.rope_by_channel())
        at = torch.arange(stream.tokens, stream.tokens + before, device=cos.device)
        at = at.expand(len(cos), -1)
        tail = _rows_at(cos, at), _rows_at(sin, at)
        at = at[:, :0] if sinks is None else sinks.columns.clamp(min=0)
        return TokenAngles(tail, (_rows_at(cos, at), _rows_at(sin, at)))


def _rows_at(table: Tensor, places: Tensor) -> Tensor:
    """The rows ``[B, t, .]`` in these places ``[B, t]`` of a table ``[B, T, .]``."""
    return table.gather(1, places.long()[..., None].expand(-1, -1, table.shape[2])).contiguous()


def _where(angles: RopeAngles | TokenAngles | None) -> tuple[Where, Where]:
    """The angles of the tail and of sinks; found once for all layers that share them."""
    if angles is None:
        return NOWHERE, NOWHERE
    if "cpu" not in angles.prepared:
        angles.prepared["cpu"] = _addresses(angles.tail), _addresses(angles.sinks)
    found: tuple[Where, Where] = angles.prepared["cpu"]
    return found


def _addresses(angles: Pair) -> Where:
    cos, sin = (native.address(t, torch.float32, *angles[0].shape) for t in angles)
    return cos, sin, angles[0].shape[2]

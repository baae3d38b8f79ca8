"""Attention over one layer whose keys and values the native library rebuilds from what is packed.

`RebuiltAttention` is what every such layer needs: its blocks, and the tokens that are kept as they are.
`NativeRebuilding` attends over affine codes, `ranked` over ranked ones.
"""

import ctypes
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.rotation import Pair
from ..addresses import BlockAddresses
from ..backend import LayerAttention
from ..call import AttentionCall
from ..rebuilding import TOKENS, at_columns
from ..rope import BlockAngles, RopeAngles, RopeTable
from . import library as native
from .attention import describe_heads
from .exact import ExactTokens
from .rebuild import KeyProduct, ValueSum
from .turning import Angles

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer


class RebuiltAttention(LayerAttention):
    """What attends over one layer of blocks that keys and values come from.

    Args:
        to: the call of the library's function.
        sources: the fields of that call, or of others, that are pointed to the blocks of these segments.
    """

    def __init__(
        self,
        layer: "CompressedLayer",
        rope: RopeTable,
        to: native.Attend,
        sources: dict[int, Any],
    ) -> None:
        codec = layer.codec.rematerialized
        assert codec is not None
        self._layer, self._codec, self._rope, self._to = layer, codec, rope, to
        self._addresses, self._sources = BlockAddresses(layer.stream), sources
        self._exact = ExactTokens(to, layer)
        describe_heads(to, codec.view, layer.stream.block)

    def attend(self, call: AttentionCall) -> Tensor | None:
        layer = self._layer
        fitted = call.fitted(layer)
        if fitted is None:
            return None
        call = fitted
        before = max(layer.tokens - call.query.shape[2] - layer.stream.tokens, 0)
        self._refresh()
        angles = self._block_angles(before)
        kept = self._point_to_kept(call, before, angles)
        found = self._attend(call, angles)
        del kept  # the library has read it
        layer.release_below()
        return found

    @abstractmethod
    def _attend(self, call: AttentionCall, angles: RopeAngles | None) -> Tensor:
        """``[B, t, H, D]``, where all that is kept is pointed to.

        Raises:
            MemoryError: the library has none.
        """

    def _refresh(self) -> None:
        """Point to the blocks as they are now."""
        addresses, stream = self._addresses, self._layer.stream
        if not addresses.refresh() or addresses.table is None:
            return
        self._fields = [addresses.fields(number) for number in self._sources]
        for to, fields in zip(self._sources.values(), self._fields, strict=True):
            for name, blocks in fields.items():
                setattr(to, name, blocks.data_ptr())
        self._table, to = addresses.table.int(), self._to
        to.lengths, to.table = addresses.lengths.data_ptr(), self._table.data_ptr()
        to.table_stride = addresses.columns
        # The column of the token in each place [c * n]; past the end of a block that was cropped, of any.
        sizes, within = addresses.lengths.long()[:, None], torch.arange(stream.block, device="cpu")
        columns = sizes.cumsum(0) - sizes + within
        self._columns = columns.flatten().clamp(max=stream.tokens - 1)

    def _block_angles(self, before: int) -> RopeAngles | None:
        """Of the blocks, of the ``before`` tokens that follow them, and of sinks; None where blocks have
        none of their own."""
        stream, sinks = self._layer.stream, self._layer.sinks
        if self._codec.rotated:
            return None
        columns = None if sinks is None else sinks.columns
        return self._rope.of(stream.lengths, stream.block, before, columns)

    def _packed_angles(self, angles: RopeAngles | None) -> Angles:
        """Of the blocks, or of their tokens."""
        if angles is not None:
            return BlockAngles(angles.within, angles.start)
        # Tokens that were cropped away have the angles of another: their scores are hidden.
        cos, sin = at_columns(self._columns, 2, *self._layer.index.rope_by_channel())
        return cos, sin

    def _point_to_kept(
        self, call: AttentionCall, before: int, angles: RopeAngles | None
    ) -> list[Tensor]:
        """Point to what is kept as it is, ``before`` tokens of it of the tail."""
        layer, codec = self._layer, self._codec
        tail = sinks = turned = None
        if before:
            assert layer.tail is not None
            tail = layer.built.of(layer.tail[:, :before])
        if layer.sinks is not None:
            sinks = codec.exact(layer.sinks.rows.to(codec.view.dtype))
        if angles is not None:
            turned = angles.tail, angles.sinks
        elif not codec.rotated:
            turned = self._token_angles(before)
        return self._exact.point(call, before, tail, sinks, turned)

    def _token_angles(self, before: int) -> tuple[Pair, Pair]:
        """Of the tail and of sinks, where blocks have none."""
        stream, sinks = self._layer.stream, self._layer.sinks
        cos, sin = (t.mT for t in self._layer.index.rope_by_channel())
        at = torch.arange(stream.tokens, stream.tokens + before, device=cos.device)
        at = at.expand(len(cos), -1)
        tail = _rows_at(cos, at), _rows_at(sin, at)
        at = at[:, :0] if sinks is None else sinks.columns.clamp(min=0)
        return tail, (_rows_at(cos, at), _rows_at(sin, at))


def _rows_at(table: Tensor, places: Tensor) -> Tensor:
    """The rows ``[B, t, .]`` in these places ``[B, t]`` of a table ``[B, T, .]``."""
    return table.gather(1, places.long()[..., None].expand(-1, -1, table.shape[2])).contiguous()


class NativeRebuilding(RebuiltAttention):
    """Attends over one layer of affine codes: the library gives scores with packed keys, their softmax
    together with the tokens that are kept as they are (csrc/weigh.h), and sums of what packed values come
    from. The product of these sums with the weights is torch's.

    Args:
        scores: with its packed keys.
        sums: of what its packed values come from; None to decode it.
    """

    def __init__(
        self,
        layer: "CompressedLayer",
        isa: str,
        rope: RopeTable,
        scores: KeyProduct,
        sums: ValueSum | None,
    ) -> None:
        library = native.library()
        assert library is not None
        self._call = native.Weigh()
        sources = {0: scores.call.key} | ({} if sums is None else {-1: sums.call.value})
        super().__init__(layer, rope, self._call.attend, sources)
        self._scores, self._sums = scores, sums
        self._function = getattr(library, f"xq_weigh_{isa}")
        self._to.dtype, self._to.scaling = native.DTYPES[torch.float32], 1
        self._bias = self._codec.value_bias
        if self._bias is not None:
            self._bias = self._bias.float().contiguous()
            width = self._codec.view.kv_width
            self._call.value_bias = native.address(self._bias, torch.float32, width)

    def _attend(self, call: AttentionCall, angles: RopeAngles | None) -> Tensor:
        sealed, heads = self._layer.stream.tokens, self._codec.view.kv_heads
        batch, _, queries, size = call.query.shape
        # [B, G, r, D], r = query heads times queries
        left = (call.query.float() * call.scaling).reshape(batch, heads, -1, size)
        weights = left[..., :0]
        if sealed:
            weights = self._scores.scores(left, self._table, self._packed_angles(angles))
        found = self._weigh(left, weights)
        if sealed:
            matrix = self._codec.value_weight.unflatten(0, (heads, -1)).mT.float()  # [G, C, D]
            found += self._sum(weights) @ matrix
        return found.view(batch, -1, queries, size).transpose(1, 2).to(call.query.dtype)

    def _weigh(self, left: Tensor, scores: Tensor) -> Tensor:
        """Turn scores ``[B, G, r, c * n]`` into weights. Returns the sums ``[B, G, r, D]`` of what is kept as
        it is."""
        to, found = self._to, torch.empty_like(left)
        to.query, to.out = left.data_ptr(), found.data_ptr()
        to.query_batch = to.out_batch = left.stride(0)
        to.query_token = to.out_token = left.shape[3]
        to.query_head = to.out_head = to.queries * left.shape[3]
        self._call.scores, self._call.columns = scores.data_ptr(), len(self._layer.stream.lengths)
        if self._function(ctypes.byref(self._call)):
            raise MemoryError("not enough memory to attend over the packed cache")
        return found

    def _sum(self, weights: Tensor) -> Tensor:
        """Sums ``[B, G, r, C]`` of what packed values come from by weights ``[B, G, r, c * n]``."""
        rows = weights.flatten(1, 2)
        if self._sums is not None:
            return self._sums.of(rows, self._table).view(*weights.shape[:3], -1)
        stream, sums = self._layer.stream, rows.new_zeros(())
        step = max(TOKENS // (len(rows) * stream.block), 1)
        for part, table in zip(
            rows.split(step * stream.block, 2), self._table.split(step, 1), strict=True
        ):
            source = stream.read_segment(-1, torch.float32, table.long()).flatten(1, 2)
            sums = sums + part @ source
        return sums.view(*weights.shape[:3], -1)


def rebuilding_attention(layer: "CompressedLayer", isa: str, rope: RopeTable) -> NativeRebuilding:
    """What attends over a layer of affine codes."""
    codec, block = layer.codec.rematerialized, layer.stream.block
    assert codec is not None
    sums = ValueSum(codec, block, isa) if ValueSum.fits(codec, block) else None
    return NativeRebuilding(layer, isa, rope, KeyProduct(codec, block, isa), sums)

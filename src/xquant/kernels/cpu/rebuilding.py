"""Attention over one layer whose keys and values the native library rebuilds, whatever they are packed as.

`rebuild` (affine codes) and `ranked` say how scores with packed keys are made, and sums of what packed values
come from. Between them lies one softmax, together with the tokens that are kept as they are (csrc/weigh.h).
"""

import ctypes
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.rotation import Pair
from ...store.tokens import TokenIndex
from ..addresses import BlockAddresses
from ..backend import LayerAttention
from ..call import AttentionCall
from ..paged import PagedAngles
from ..rebuilding import TOKENS
from ..rope import BlockAngles, RopeAngles, RopeTable
from . import library as native
from .kept import point_to_kept

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

Angles = Pair | BlockAngles


class KeyScores(ABC):
    """Scores with the keys of one layer, which a function of the library builds of packed blocks.

    Args:
        call: the function's; its ``key`` is pointed to the blocks by whoever has them.
    """

    by_block: bool = False
    """Whether `scores` takes the angles of blocks where they are known."""

    def __init__(self, function: str, call: Any, block: int) -> None:
        library = native.library()
        assert library is not None
        self.call, self._block = call, block
        self._function = getattr(library, function)

    @abstractmethod
    def angles(self, index: TokenIndex, like: Tensor, columns: Tensor) -> Pair:
        """cos and sin, fp32, of the tokens in these ``columns`` of a cache, as `scores` takes them; of each
        sequence first."""

    @abstractmethod
    def angles_of(self, angles: PagedAngles) -> Angles:
        """The same for any sequence of an engine."""

    @abstractmethod
    def scores(
        self, query: Tensor, table: Tensor, angles: Angles, limits: Tensor | None = None
    ) -> Tensor:
        """Scores ``[B, G, r, c * n]`` of queries ``[B, G, r, D]`` (fp32) with the keys of the blocks
        ``table`` ``[B, c]``; angles may be of one sequence for all. With ``limits`` int32 ``[B]``, those of
        the blocks after so many tokens are not written."""

    def _scores(self, query: Tensor, table: Tensor, limits: Tensor | None) -> Tensor:
        """The same of contiguous queries ``[B, G, r, .]``, where the angles are set.

        Raises:
            MemoryError: the library has none.
        """
        call = self.call
        batch, heads, rows, _ = query.shape
        call.batch, call.columns = table.shape
        scores = torch.empty(batch, heads, rows, call.columns * self._block)
        table = table.int()
        call.table, call.table_stride = table.data_ptr(), table.stride(0)
        call.limits = None if limits is None else limits.data_ptr()
        call.query, call.scores, call.rows = query.data_ptr(), scores.data_ptr(), rows
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to rebuild keys")
        return scores

    def _set_angles(self, angles: Pair) -> None:
        """Of every token; cos and sin are of the same strides."""
        cos, sin = angles
        self.call.cos, self.call.sin = cos.data_ptr(), sin.data_ptr()
        self.call.rope_batch = batch_stride(cos)


def batch_stride(of: Tensor) -> int:
    return of.stride(0) if len(of) > 1 else 0


class PackedSum:
    """Sums of what one layer's values come from, by a function of the library.

    Args:
        call: the function's; its ``value`` is pointed to the blocks by whoever has them.
    """

    def __init__(self, function: str, call: Any, channels: int) -> None:
        library = native.library()
        assert library is not None
        self.call, self._channels = call, channels
        self._function = getattr(library, function)

    def of(self, weights: Tensor, table: Tensor, limits: Tensor | None = None) -> Tensor:
        """Sums fp32 ``[B, r, C]`` of the rows of the blocks ``table`` ``[B, c]`` by ``weights``
        ``[B, r, c * n]`` (fp32); with ``limits`` int32 ``[B]``, of the blocks with so many tokens.

        Raises:
            MemoryError: the library has none.
        """
        call, weights = self.call, weights.contiguous()
        out = torch.empty(*weights.shape[:2], self._channels)
        call.batch, call.columns = table.shape
        table = table.int()
        call.table, call.table_stride = table.data_ptr(), table.stride(0)
        call.limits = None if limits is None else limits.data_ptr()
        call.weights, call.out, call.rows = weights.data_ptr(), out.data_ptr(), weights.shape[1]
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to sum values")
        return out


class NativeRebuilding(LayerAttention):
    """Attends over one layer whose keys the library rebuilds: it gives scores with packed keys, their softmax
    together with the tokens that are kept as they are (csrc/weigh.h), and sums of what packed values come
    from. The product of these sums with the weights is torch's.

    Args:
        scores: with these keys.
        sums: of what values come from; None to decode it.
    """

    def __init__(
        self,
        layer: "CompressedLayer",
        isa: str,
        rope: RopeTable,
        scores: KeyScores,
        sums: "PackedSum | None",
    ) -> None:
        codec, library = layer.codec.rematerialized, native.library()
        assert codec is not None and library is not None
        self._layer, self._codec, self._rope = layer, codec, rope
        self._scores, self._sums = scores, sums
        self._followed = [FollowedBlocks(layer, 0, scores.call.key)]
        if sums is not None:
            self._followed.append(FollowedBlocks(layer, -1, sums.call.value))
        self._function = getattr(library, f"xq_weigh_{isa}")
        self._call = native.Weigh()
        view, to = codec.view, self._call.attend
        to.block, to.kv_heads, to.head_size = layer.stream.block, view.kv_heads, view.head_size
        to.group_heads = view.query_heads // view.kv_heads
        to.dtype, to.scaling = native.DTYPES[torch.float32], 1
        self._bias = codec.value_bias
        if self._bias is not None:
            self._bias = self._bias.float().contiguous()
            self._call.value_bias = native.address(self._bias, torch.float32, view.kv_width)

    def attend(self, call: AttentionCall) -> Tensor | None:
        if not call.is_plain:
            return None
        layer, heads = self._layer, self._codec.view.kv_heads
        batch, _, queries, size = call.query.shape
        # [B, G, r, D], r = query heads times queries
        left = (call.query.float() * call.scaling).reshape(batch, heads, -1, size)
        before = max(layer.tokens - queries - layer.stream.tokens, 0)
        angles, weights = self._block_angles(before), left[..., :0]
        if layer.stream.tokens:
            self._refresh()
            weights = self._score(left, angles)
        found = self._weigh(call, left, weights, before, angles)
        if layer.stream.tokens:
            matrix = self._codec.value_weight.unflatten(0, (heads, -1)).mT.float()  # [G, C, D]
            found += self._sum(weights) @ matrix
        layer.release_below()
        return found.view(batch, -1, queries, size).transpose(1, 2).to(call.query.dtype)

    def _block_angles(self, before: int) -> RopeAngles | None:
        """Of the blocks, of the ``before`` tokens that follow them, and of sinks; None where blocks have
        none of their own."""
        stream, sinks = self._layer.stream, self._layer.sinks
        if self._codec.rotated:
            return None
        columns = None if sinks is None else sinks.columns
        return self._rope.of(stream.lengths, stream.block, before, columns)

    def _score(self, left: Tensor, angles: RopeAngles | None) -> Tensor:
        if angles is not None and self._scores.by_block:
            given: Angles = BlockAngles(angles.within, angles.start)
        else:
            given = self._scores.angles(self._layer.index, left, self._columns)
        return self._scores.scores(left, self._table, given)

    def _refresh(self) -> None:
        """Point to the blocks as they are now."""
        changed = [blocks.refresh() for blocks in self._followed]
        if not changed[0]:
            return
        stream, addresses = self._layer.stream, self._followed[0].addresses
        assert addresses.table is not None
        self._table = addresses.table.int()
        self._call.attend.lengths = addresses.lengths.data_ptr()
        # The column of the token in each place [c * n]; past the end of a block that was cropped, of any.
        sizes, within = addresses.lengths.long()[:, None], torch.arange(stream.block)
        columns = sizes.cumsum(0) - sizes + within
        self._columns = columns.flatten().clamp(max=stream.tokens - 1)

    def _weigh(
        self,
        call: AttentionCall,
        left: Tensor,
        scores: Tensor,
        before: int,
        angles: RopeAngles | None,
    ) -> Tensor:
        """Turn scores ``[B, G, r, c * n]`` into weights. Returns the sums ``[B, G, r, D]`` of what is kept as
        it is, ``before`` tokens of it of the tail."""
        layer, codec, to = self._layer, self._codec, self._call.attend
        tail = sinks = None
        if before:
            assert layer.tail is not None
            tail = layer.built.of(layer.tail[:, :before])
        if layer.sinks is not None:
            sinks = codec.exact(layer.sinks.rows.to(codec.view.dtype))
        turned = None
        if angles is not None:
            turned = angles.tail, angles.sinks
        elif not codec.rotated:
            turned = self._token_angles(before)
        kept = point_to_kept(to, layer, call, tail, sinks, turned)
        found = torch.empty_like(left)
        to.query, to.out = left.data_ptr(), found.data_ptr()
        to.query_batch = to.out_batch = left.stride(0)
        to.query_token = to.out_token = left.shape[3]
        to.query_head = to.out_head = to.queries * left.shape[3]
        self._call.scores, self._call.columns = scores.data_ptr(), len(layer.stream.lengths)
        if self._function(ctypes.byref(self._call)):
            raise MemoryError("not enough memory to attend over the packed cache")
        del kept  # the library has read it
        return found

    def _token_angles(self, before: int) -> tuple[Pair, Pair]:
        """Of the tail and of sinks, where blocks have none."""
        stream, sinks = self._layer.stream, self._layer.sinks
        cos, sin = (t.mT for t in self._layer.index.rope_by_channel())
        at = torch.arange(stream.tokens, stream.tokens + before).expand(len(cos), -1)
        tail = _rows_at(cos, at), _rows_at(sin, at)
        at = at[:, :0] if sinks is None else sinks.columns.clamp(min=0)
        return tail, (_rows_at(cos, at), _rows_at(sin, at))

    def _sum(self, weights: Tensor) -> Tensor:
        """Sums ``[B, G, r, C]`` of what packed values come from by weights ``[B, G, r, c * n]``."""
        rows = weights.flatten(1, 2)
        if self._sums is not None:
            return self._sums.of(rows, self._table).view(*weights.shape[:3], -1)
        stream, sums = self._layer.stream, torch.zeros(())
        step = max(TOKENS // (len(rows) * stream.block), 1)
        for part, table in zip(
            rows.split(step * stream.block, 2), self._table.split(step, 1), strict=True
        ):
            source = stream.read_segment(-1, torch.float32, table.long()).flatten(1, 2)
            sums = sums + part @ source
        return sums.view(*weights.shape[:3], -1)


def _rows_at(table: Tensor, places: Tensor) -> Tensor:
    """The rows ``[B, t, .]`` in these places ``[B, t]`` of a table ``[B, T, .]``."""
    return table.gather(1, places.long()[..., None].expand(-1, -1, table.shape[2])).contiguous()


class FollowedBlocks:
    """Keeps an operand of the C interface pointed to the blocks of one segment."""

    def __init__(self, layer: "CompressedLayer", number: int, to: Any) -> None:
        self.addresses = BlockAddresses(layer.stream)
        self._number, self._to = number, to

    def refresh(self) -> bool:
        """Follow the blocks; whether anything changed."""
        changed = self.addresses.refresh()
        if changed:
            self._fields = self.addresses.fields(self._number)
            for name, blocks in self._fields.items():
                setattr(self._to, name, blocks.data_ptr())
        return changed

"""Attention over keys that are rebuilt from packed rows, by the native library: csrc/rebuild.h.

A score is ``Q · R(p) (W_k x_p + b_k)``; the library multiplies the codes of ``x_p`` with int16 weights, so
keys are never stored. Values: see `rebuilding`. It equals attention over `CompressedLayer.read` but for the
rounding of the weights to 15 bits.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.rematerialized import Rematerialized
from ...models.rotation import Pair
from ...quant.operand import Operand
from ...quant.pack import Tile
from ...store.tokens import TokenIndex
from ..addresses import BlockAddresses
from ..blockwise import Run, split_bias
from ..rebuilding import TOKENS, RebuildingAttention, at_columns
from . import library as native

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

ROWS = 8
"""As BUILT_ROWS in csrc/rebuild.h."""
PAIRED = [0, 2, 1, 3]
"""The order of the channels of a quad in registers (csrc/tiles.h)."""
SCORES = 2**21
"""That the library computes at a time, or as many as `TOKENS` tokens have: it keeps no keys."""


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot rebuild the keys of a layer; empty where it can."""
    segment, view = codec.segments[0], codec.view
    rebuilt = codec.rematerialized
    assert rebuilt is not None
    operand = segment.operand(block)
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    if codec.sums_deltas:
        return "keys are rebuilt from sums over layers"
    affine = isinstance(operand, Operand) and operand.levels is None
    if not affine or segment.channels != rebuilt.key_weight.shape[1]:
        return "not all that keys come from is quantized alike"
    assert isinstance(operand, Operand)
    if view.key_norm is not None:
        return "keys are normalized after they are rebuilt"
    if operand.tile is None or not operand.tile.fits(block) or view.head_size % ROWS:
        return f"states of {segment.channels} channels in blocks of {block}"
    if not operand.per_token and operand.group < block:
        return "several ranges of a channel in a block"
    if operand.tile.head * (2**operand.bits - 1) * 32767 >= 2**31 and operand.per_token:
        return f"{operand.bits}-bit ranges of {operand.tile.head} channels"
    return ""


class KeyScores(ABC):
    """Scores with the keys of one layer, which a function of the library builds of packed blocks.

    Args:
        call: the function's; its ``key`` is pointed to the blocks by whoever has them.
    """

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
    def angles_of(self, cos: Tensor, sin: Tensor) -> Pair:
        """The same of positions 0, 1, ... for any sequence, from ``[positions, R / 2]``."""

    @abstractmethod
    def scores(
        self, query: Tensor, table: Tensor, angles: Pair, limits: Tensor | None = None
    ) -> Tensor:
        """Scores ``[B, G, r, c * n]`` of queries ``[B, G, r, D]`` (fp32) with the keys of the blocks
        ``table`` ``[B, c]``. With ``limits`` int32 ``[B]``, those of the blocks after so many tokens are not
        written."""

    def _scores(self, query: Tensor, table: Tensor, angles: Pair, limits: Tensor | None) -> Tensor:
        """The same of contiguous queries ``[B, G, r, .]``; cos and sin are of the same strides.

        Raises:
            MemoryError: the library has none.
        """
        call, (cos, sin) = self.call, angles
        batch, heads, rows, _ = query.shape
        call.batch, call.columns = table.shape
        scores = torch.empty(batch, heads, rows, call.columns * self._block)
        table = table.int()
        call.table, call.table_stride = table.data_ptr(), table.stride(0)
        call.limits = None if limits is None else limits.data_ptr()
        call.cos, call.sin, call.rope_batch = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        call.query, call.scores, call.rows = query.data_ptr(), scores.data_ptr(), rows
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to rebuild keys")
        return scores


class KeyProduct(KeyScores):
    """The native side of one layer's key projection."""

    def __init__(self, codec: Rematerialized, block: int, isa: str) -> None:
        call, view = native.RebuildScores(), codec.view
        super().__init__(f"xq_rebuild_scores_{isa}", call, block)
        operand = codec.segments[0].operand(block)
        assert isinstance(operand, Operand) and operand.tile is not None
        call.key.bits, call.key.per_token = operand.bits, operand.per_token
        group = call.key.group = operand.tile.head
        call.block, call.channels = block, operand.channels
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        call.rotary_pairs = view.rotary_size // 2
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = self._prepare(
                codec.key_weight.float(), group, not operand.per_token
            )
        weights, unit, column, totals = codec.prepared["keys"]
        bias = codec.key_bias
        bias = torch.zeros(0) if bias is None else bias.float().contiguous()
        self._constant = [weights, unit, column, totals, bias]
        call.weights, call.weight_scale, call.channel_scale, call.weight_sums = (
            t.data_ptr() for t in self._constant[:4]
        )
        call.bias = bias.data_ptr() if len(bias) else None

    @staticmethod
    def _prepare(weight: Tensor, group: int, by_channel: bool) -> list[Tensor]:
        """int16 weights, the unit of each row ``[N]``, what columns were divided by ``[C]``, and sums by
        range ``[N, C/group]`` of ``weight`` ``[N, C]``."""
        totals = weight.unflatten(1, (-1, group)).sum(-1)
        column = torch.ones(weight.shape[1])
        if by_channel:
            # Columns of the same size use the 15 bits alike; their scales take the difference.
            column = weight.norm(dim=0).clamp(min=torch.finfo(weight.dtype).tiny)
            weight = weight / column
        unit = weight.abs().amax(1).clamp(min=1e-30) / 32767
        return [
            in_tile_order((weight / unit[:, None]).round().short(), group),
            unit,
            column,
            totals,
        ]

    def angles(self, index: TokenIndex, like: Tensor, columns: Tensor) -> Pair:
        cos, sin = (at_columns(t, columns, 2) for t in index.rope_by_channel())
        return cos, sin

    def angles_of(self, cos: Tensor, sin: Tensor) -> Pair:
        return cos.mT.contiguous()[None], sin.mT.contiguous()[None]

    def scores(
        self, query: Tensor, table: Tensor, angles: Pair, limits: Tensor | None = None
    ) -> Tensor:
        self.call.rope_channel = angles[0].stride(1)
        return self._scores(query.contiguous(), table, angles, limits)


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


class ValueSum(PackedSum):
    """The same of affine codes per token; no weight may be below 0."""

    def __init__(self, codec: LayerCodec, block: int, isa: str) -> None:
        call, operand = native.RebuildSum(), codec.segments[-1].operand(block)
        assert isinstance(operand, Operand)
        super().__init__(f"xq_rebuild_sum_{isa}", call, operand.channels)
        call.value.bits, call.value.per_token, call.value.group = operand.bits, True, operand.group
        call.block, call.channels = block, operand.channels

    @staticmethod
    def fits(codec: LayerCodec, block: int) -> bool:
        """Whether the library can sum what the values of a layer come from."""
        segment = codec.segments[-1]
        operand = segment.operand(block)
        return (
            isinstance(operand, Operand)
            and operand.levels is None
            and operand.per_token
            and operand.tile == Tile(segment.channels, "channels")
            and operand.tile.fits(block)
            and operand.group % 16 == 0
        )


class NativeRebuilding(RebuildingAttention):
    """Attends over one layer whose keys the library rebuilds.

    Args:
        scores: with these keys.
        sums: of what values come from; None to decode it.
    """

    def __init__(
        self, layer: "CompressedLayer", scores: KeyScores, sums: "PackedSum | None"
    ) -> None:
        super().__init__(layer)
        self._scores, self._sums = scores, sums
        self._followed = [FollowedBlocks(layer, 0, scores.call.key)]
        if sums is not None:
            self._followed.append(FollowedBlocks(layer, -1, sums.call.value))

    def _coded(self, left: Tensor, key: Tensor, bias: Tensor | None, limit: int) -> Iterator[Run]:
        for blocks in self._followed:
            blocks.refresh()
        tokens = max(SCORES // left[0, ..., 0].numel(), TOKENS)
        step = max(tokens // (len(key) * self._layer.stream.block), 1)
        for table, columns, hidden in self._blocks(left, bias, limit, step):
            query = left[:, 0]
            angles = self._scores.angles(self._layer.index, query, columns)
            scores = self._scores.scores(query, table, angles)[:, None]
            yield scores, split_bias(hidden, 1), partial(self._weigh_blocks, table=table)

    def _weigh_blocks(self, weights: Tensor, table: Tensor) -> Tensor:
        """As `_weigh`, with what is packed in the blocks ``table`` ``[B, c]``."""
        if self._sums is None:
            source = self._layer.stream.read_segment(-1, torch.float32, table)
            return self._weigh(weights, source.flatten(1, 2))
        sums = self._sums.of(weights.flatten(1, 3), table)
        return sums.view(*weights.shape[:-1], -1)


def rebuilding_attention(layer: "CompressedLayer", isa: str) -> NativeRebuilding:
    """What attends over a layer of affine codes."""
    codec, block = layer.codec.rematerialized, layer.stream.block
    assert codec is not None
    sums = ValueSum(codec, block, isa) if ValueSum.fits(codec, block) else None
    return NativeRebuilding(layer, KeyProduct(codec, block, isa), sums)


def in_tile_order(weights: Tensor, group: int) -> Tensor:
    """int16 weights ``[N, C]`` in the order in which they meet the codes of tiles of ``group`` channels:
    ``[N/8, C/group, units, 8, 8, 4]``, ``units = group / 32``; the last but one are the 8 of ``N``."""
    split = weights.view(-1, ROWS, weights.shape[1] // group, 8, group // 32, 4)
    return split.permute(0, 2, 4, 3, 1, 5)[..., PAIRED].contiguous()


class FollowedBlocks:
    """Keeps an operand of the C interface pointed to the blocks of one segment."""

    def __init__(self, layer: "CompressedLayer", number: int, to: Any) -> None:
        self._addresses = BlockAddresses(layer.stream)
        self._number, self._to = number, to

    def refresh(self) -> None:
        if self._addresses.refresh():
            self._fields = self._addresses.fields(self._number)
            for name, blocks in self._fields.items():
                setattr(self._to, name, blocks.data_ptr())

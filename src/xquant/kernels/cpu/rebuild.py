"""Attention over keys that are rebuilt from packed rows, by the native library: csrc/rebuild.h.

A score is ``Q · R(p) (W_k x_p + b_k)``; the library multiplies the codes of ``x_p`` with int16 weights, so
keys are never stored, and those of slow pairs never built (`slow`). It equals attention over
`CompressedLayer.read` but for the rounding of the weights to 15 bits and what waves miss.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.rematerialized import Rematerialized
from ...models.rotation import Pair
from ...quant.operand import Operand
from ...quant.pack import Tile
from ...store.tokens import TokenIndex
from ..paged import PagedAngles
from ..rebuilding import at_columns
from ..rope import BlockAngles, RopeTable
from ..slow import SlowPairs, slow_pairs, widened
from . import library as native
from .rebuilding import Angles, KeyScores, NativeRebuilding, PackedSum, batch_stride

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

ROWS = 8
"""As BUILT_ROWS in csrc/rebuild.h."""
SLOW_LIMIT = 8191
"""As in csrc/rebuild.h."""
PAIRED = [0, 2, 1, 3]
"""The order of the channels of a quad in registers (csrc/tiles.h)."""


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


class KeyProduct(KeyScores):
    """The native side of one layer's key projection."""

    by_block = True

    def __init__(self, codec: Rematerialized, block: int, isa: str) -> None:
        call, view = native.RebuildScores(), codec.view
        super().__init__(f"xq_rebuild_scores_{isa}", call, block)
        operand = codec.segments[0].operand(block)
        assert isinstance(operand, Operand) and operand.tile is not None
        call.key.bits, call.key.per_token = operand.bits, operand.per_token
        self._group = call.key.group = operand.tile.head
        call.block, call.channels = block, operand.channels
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        call.rotary_pairs = view.rotary_size // 2
        self._codec, self._usual_rows = codec, view.query_heads // view.kv_heads
        # Channels in the order of their pairs.
        turned = torch.arange(view.rotary_size).view(2, -1).T.flatten()
        self._order = torch.cat([turned, torch.arange(view.rotary_size, view.head_size)])
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = self._prepare()
        weights, unit, column, totals = codec.prepared["keys"]
        bias = torch.zeros(0) if codec.key_bias is None else self._ordered(codec.key_bias)
        self._constant = [weights, unit, column, totals, bias]
        call.weights, call.weight_scale, call.channel_scale, call.weight_sums = (
            t.data_ptr() for t in self._constant[:4]
        )
        call.bias = bias.data_ptr() if len(bias) else None

    def _ordered(self, rows: Tensor) -> Tensor:
        """Rows ``[G * D, ...]`` of heads in fp32, in the order of their pairs."""
        heads = rows.float().unflatten(0, (-1, len(self._order)))
        return heads[:, self._order].flatten(0, 1).contiguous()

    def _prepare(self) -> list[Tensor]:
        """int16 weights, the unit of each row ``[N]``, what columns were divided by ``[C]``, and sums by
        range ``[N, C/group]`` of the weight of keys ``[N, C]``."""
        weight = self._ordered(self._codec.key_weight)
        totals = weight.unflatten(1, (-1, self._group)).sum(-1)
        column = torch.ones(weight.shape[1])
        if not self.call.key.per_token:
            # Columns of the same size use the 15 bits alike; their scales take the difference.
            column = weight.norm(dim=0).clamp(min=torch.finfo(weight.dtype).tiny)
            weight = weight / column
        unit = weight.abs().amax(1).clamp(min=1e-30) / 32767
        whole = (weight / unit[:, None]).round().short()
        return [in_tile_order(whole, self._group), unit, column, totals]

    def _prepare_slow(self, built: int) -> list[Tensor]:
        """Of the channels of a head from ``built`` on: int16 weights ``[G, pairs, C, 2]``, their units and
        the bias of keys ``[G, 2, width]``."""

        def by_pair(rows: Tensor) -> Tensor:
            heads = self._ordered(rows).unflatten(0, (-1, len(self._order)))
            return heads[:, built:].unflatten(1, (-1, 2))  # [G, pairs, 2, ...]

        weight = by_pair(self._codec.key_weight) / self._codec.prepared["keys"][2]
        unit = weight.abs().amax(3).clamp(min=1e-30) / SLOW_LIMIT
        whole = (weight / unit[..., None]).round().short().transpose(2, 3).contiguous()
        bias = self._codec.key_bias
        bias = unit * 0 if bias is None else by_pair(bias)
        return [whole, *(widened(t.mT) for t in (unit, bias))]

    def angles(self, index: TokenIndex, like: Tensor, columns: Tensor) -> Pair:
        cos, sin = at_columns(columns, 2, *index.rope_by_channel())
        return cos, sin

    def angles_of(self, angles: PagedAngles) -> BlockAngles:
        cos, sin = (t[None] for t in angles.starts)
        return BlockAngles(angles.within, (cos, sin))

    def scores(
        self, query: Tensor, table: Tensor, angles: Angles, limits: Tensor | None = None
    ) -> Tensor:
        call, size = self.call, query.shape[3]
        call.start_cos = call.start_sin = None
        call.built = size
        if isinstance(angles, BlockAngles):
            turned = self._set_blocks(angles, size, query.shape[2])
        else:
            turned = angles
        call.rope_channel = turned[0].stride(1)
        self._set_angles(turned)
        return self._scores(query.contiguous(), table, limits)

    def _set_blocks(self, angles: BlockAngles, size: int, rows: int) -> Pair:
        """Set the angles that blocks start at, and slow pairs. Returns those of the places of a block."""
        call, (within, start) = self.call, angles
        call.start_cos, call.start_sin = (t.data_ptr() for t in start)
        call.start_batch = batch_stride(start[0])
        if rows == self._usual_rows:
            self._set_slow(slow_pairs(within, size, rows))
        if "by pair" not in within.prepared:
            within.prepared["by pair"] = tuple(t.T[None].contiguous() for t in within.angles)
        by_pair: Pair = within.prepared["by pair"]
        return by_pair

    def _set_slow(self, slow: SlowPairs | None) -> None:
        if slow is None:
            return
        call, name = self.call, f"slow from {slow.built}"
        if name not in self._codec.prepared:
            self._codec.prepared[name] = self._prepare_slow(slow.built)
        call.slow_weights, call.slow_scale, call.slow_bias = (
            t.data_ptr() for t in self._codec.prepared[name]
        )
        call.built, call.waves = slow.built, len(slow.wave)
        call.wave, call.wave_cos, call.wave_sin = (t.data_ptr() for t in slow[1:])


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


def rebuilding_attention(layer: "CompressedLayer", isa: str, rope: RopeTable) -> NativeRebuilding:
    """What attends over a layer of affine codes."""
    codec, block = layer.codec.rematerialized, layer.stream.block
    assert codec is not None
    sums = ValueSum(codec, block, isa) if ValueSum.fits(codec, block) else None
    return NativeRebuilding(layer, isa, rope, KeyProduct(codec, block, isa), sums)


def in_tile_order(weights: Tensor, group: int) -> Tensor:
    """int16 weights ``[N, C]`` in the order in which they meet the codes of tiles of ``group`` channels:
    ``[N/8, C/group, units, 8, 8, 4]``, ``units = group / 32``; the last but one are the 8 of ``N``."""
    split = weights.view(-1, ROWS, weights.shape[1] // group, 8, group // 32, 4)
    return split.permute(0, 2, 4, 3, 1, 5)[..., PAIRED].contiguous()

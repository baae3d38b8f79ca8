"""Attention over keys and values that are rebuilt from ranked codes, by the native library: csrc/ranked.h.

As `rebuild`: scores with keys ``W_k x + m_k``, of which ``x`` is read from its codes, and sums of ``x``.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.rematerialized import Rematerialized
from ...models.rotation import Pair
from ...quant.operand import RankedOperand
from ...quant.ranked import level_table, size_table
from ...store.tokens import TokenIndex
from ..paged import PagedAngles
from ..rebuilding import at_columns
from ..rope import BlockAngles, RopeTable
from . import library as native
from .rebuilding import Angles, KeyScores, NativeRebuilding, PackedSum

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

WEIGHT_LIMIT = 8191
"""As in csrc/ranked.h."""
RUN = 32
"""Channels of a head whose weights are zipped with those of another state at a time."""


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot attend on the ranked codes of a layer; empty where it can."""
    device = codec.view.device.type
    return "" if device == "cpu" else f"the layer is on {device}"


@cache
def level_words() -> tuple[Tensor, Tensor]:
    """`level_table` as int16 of which 32767 is the highest of each width, and what that is, fp32
    ``[widths]``."""
    levels = level_table()
    highest = levels.abs().amax((1, 2))
    return (levels / highest[:, None, None] * 32767).round().short(), highest


def zipped(weight: Tensor) -> Tensor:
    """Rows ``[..., D]``, ``D`` a multiple of 32, in the order in which zipping two of them in registers gives
    pairs of channels 0, 1, ...: by 128 bits, the first half of 4 channels is below the second."""
    return weight.unflatten(-1, (-1, 2, 4, 4)).transpose(-3, -2).flatten(-4).contiguous()


def by_state(weight: Tensor, heads: int) -> list[Tensor]:
    """The weights ``[G * D, C]`` of keys as int16 ``[C, G, width]``, ``width`` the next multiple of 32, and
    the unit of each of the ``C``."""
    states = weight.float().T.unflatten(1, (heads, -1))
    unit = states.abs().amax((1, 2)).clamp(min=1e-30) / WEIGHT_LIMIT
    whole = (states / unit[:, None, None]).round().short()
    return [zipped(_widened(whole)), unit]


def _widened(x: Tensor) -> Tensor:
    """Rows ``[..., D]`` with zeros up to a multiple of `RUN`."""
    missing = -x.shape[-1] % RUN
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).contiguous()


def _describe(to: native.RankedOperand, codec: LayerCodec, block: int) -> list[Tensor]:
    """Sets what does not change; returns what is pointed to."""
    (segment,) = codec.segments
    operand = segment.operand(block)
    assert isinstance(operand, RankedOperand)
    (sizes, zero), (levels, highest) = size_table(), level_words()
    to.usual = native.address(operand.usual, torch.int16, segment.channels)
    to.sizes = sizes[zero:].data_ptr()
    to.levels, to.highest_level = levels.data_ptr(), highest.data_ptr()
    to.counts[:] = operand.counts
    to.block, to.channels = block, segment.channels
    return [operand.usual, sizes, levels, highest]


class RankedKeys(KeyScores):
    """The native side of one layer's keys."""

    def __init__(self, codec: Rematerialized, block: int, isa: str) -> None:
        call = native.RankedScores()
        super().__init__(f"xq_ranked_scores_{isa}", call, block)
        assert codec.key_bias is not None
        heads = codec.view.kv_heads
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = by_state(codec.key_weight, heads)
        weights, unit = codec.prepared["keys"]
        mean = _widened(codec.key_bias.float().view(heads, -1))
        self._constant = [*_describe(call.key, codec, block), weights, unit, mean]
        channels, width = call.key.channels, mean.shape[1]
        call.weights = native.address(weights, torch.int16, channels, heads, width)
        call.weight_scale = native.address(unit, torch.float32, channels)
        call.mean = native.address(mean, torch.float32, heads, width)
        call.kv_heads, call.width = heads, width
        call.rotary_pairs = codec.view.rotary_size // 2

    def angles(self, index: TokenIndex, like: Tensor, columns: Tensor) -> Pair:
        # Tokens that were cropped away have the angles of another: their scores are hidden.
        cos, sin = at_columns(columns, 1, *index.rope_by_token())
        return cos, sin

    def angles_of(self, angles: PagedAngles) -> Pair:
        cos, sin = (t.contiguous()[None] for t in angles.every)
        return cos, sin

    def scores(
        self, query: Tensor, table: Tensor, angles: Angles, limits: Tensor | None = None
    ) -> Tensor:
        assert not isinstance(angles, BlockAngles)
        self.call.rope_token = angles[0].stride(1)
        self._set_angles(angles)
        return self._scores(_widened(query), table, limits)


class RankedSum(PackedSum):
    """Sums of the ranked codes that one layer's values come from."""

    def __init__(self, codec: LayerCodec, block: int, isa: str) -> None:
        call = native.RankedSum()
        super().__init__(f"xq_ranked_sum_{isa}", call, codec.segments[-1].channels)
        self._constant = _describe(call.value, codec, block)


def ranked_attention(layer: "CompressedLayer", isa: str, rope: RopeTable) -> NativeRebuilding:
    """What attends over a layer of ranked codes."""
    codec, block = layer.codec.rematerialized, layer.stream.block
    assert codec is not None
    keys, sums = RankedKeys(codec, block, isa), RankedSum(codec, block, isa)
    return NativeRebuilding(layer, isa, rope, keys, sums)

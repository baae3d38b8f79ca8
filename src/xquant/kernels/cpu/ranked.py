"""Attention over keys and values that are rebuilt from ranked codes, by the native library: csrc/ranked.h.

Keys are ``W_k x + m_k`` and values ``W_v x + m_v``, of which ``x`` is read from its codes once for both. A
second segment has states that only values are products of.
"""

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.rematerialized import Rematerialized
from ...quant.operand import RankedOperand
from ...quant.ranked import level_table, size_table
from ...store.pages import PageLayout
from ..call import AttentionCall
from ..paged import PagedAngles
from ..rope import BlockAngles, RopeAngles, RopeTable
from ..slow import widened
from . import library as native
from .attention import describe_heads
from .paged import LibraryPages
from .rebuilding import RebuiltAttention
from .turning import Angles, in_pairs, of_pages, point_to_angles

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

WEIGHT_LIMIT = 8191
"""As in csrc/ranked_columns.h."""
RUN = 32
"""Channels of a head whose weights are zipped with those of another state at a time."""


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot attend on the ranked codes of a layer; empty where it can."""
    view = codec.view
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    return "" if view.dtype in native.DTYPES else f"{view.dtype} states"


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


class RankedCall:
    """The call of one layer, for its blocks or for pages.

    Whoever has the blocks points the ``sources`` to them, the fields of the call by segment.
    """

    def __init__(self, codec: Rematerialized, block: int, isa: str) -> None:
        library = native.library()
        assert library is not None and codec.key_bias is not None and codec.value_bias is not None
        self.to = to = native.RankedAttend()
        self._codec, self._function = codec, getattr(library, f"xq_ranked_attend_{isa}")
        self._turned: tuple[BlockAngles | None, int] = None, 0
        (sizes, zero), (levels, highest) = size_table(), level_words()
        self.sources = dict(zip(range(len(codec.segments)), (to.states, to.more), strict=False))
        for number, states in self.sources.items():
            segment = codec.segments[number]
            operand = segment.operand(block)
            assert isinstance(operand, RankedOperand)
            states.usual = native.address(operand.usual, torch.int16, segment.channels)
            states.sizes = sizes[zero:].data_ptr()
            states.levels, states.highest_level = levels.data_ptr(), highest.data_ptr()
            states.counts[:] = operand.counts
            states.block, states.channels = block, segment.channels
        width, channels = codec.view.kv_width, to.states.channels + to.more.channels
        value, mean = codec.value_weight, codec.value_bias.float().contiguous()
        # Keys come from a copy in another order.
        native.address(codec.key_weight, value.dtype, width, to.states.channels)
        to.value_weight = native.address(value, value.dtype, width, channels)
        to.value_dtype = native.DTYPES[value.dtype]
        to.value_mean = native.address(mean, torch.float32, width)
        self._constant = [codec.segments, sizes, levels, highest, value, mean]

    def turn(self, angles: Angles, rows: int) -> None:
        """Point to the angles of packed keys, which the caller keeps, and to weights that suit ``rows`` query
        rows of a key/value head."""
        of_blocks = angles if isinstance(angles, BlockAngles) else None
        known, known_rows = self._turned
        if of_blocks and known and of_blocks.start is known.start and rows == known_rows:
            return
        self._turned = of_blocks, rows
        to, prepared = self.to, self._codec.prepared
        slow = point_to_angles(to.turning, self._codec.view, angles, rows)
        built = to.turning.built
        name = f"ranked keys from {built}" if slow else "ranked keys"
        if name not in prepared:
            prepared[name] = self._prepare(built)
        to.weights, to.weight_scale, to.mean, *of_slow = (t.data_ptr() for t in prepared[name])
        to.slow_weights, to.slow_bytes, to.slow_units, to.slow_norm, to.slow_mean = of_slow

    def _prepare(self, built: int) -> list[Tensor]:
        """The weight ``[G * D, C]`` of keys as int16, and their mean, as xq_ranked_attend takes them: the
        first ``built`` channels of a head, and the rest as slow pairs."""
        view, bias = self._codec.view, self._codec.key_bias
        assert bias is not None
        by_state = in_pairs(view, self._codec.key_weight).permute(2, 0, 1)  # [C, G, D]
        unit = by_state.abs().amax((1, 2)).clamp(min=1e-30) / WEIGHT_LIMIT
        whole = (by_state / unit[:, None, None]).round().short()
        mean = in_pairs(view, bias)  # [G, D]
        pairs = max(view.head_size - built, 0) // 2
        slow = whole[..., built:].reshape(*whole.shape[:2], pairs, 2).contiguous()
        slow_mean = mean[:, built:].reshape(len(mean), pairs, 2).mT
        norm = slow.float().square().sum((2, 3)).sqrt().amax(0)
        return [
            zipped(_up_to(whole[..., :built], -(-built // RUN) * RUN)),
            unit,
            _up_to(mean[:, :built], built),
            slow,
            *in_bytes(slow),
            norm,
            widened(slow_mean),
        ]

    def run(self) -> None:
        """Attend.

        Raises:
            MemoryError: the library has none.
        """
        if self._function(ctypes.byref(self.to)):
            raise MemoryError("not enough memory to attend over the packed cache")


def in_bytes(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of slow pairs, int16 ``[C, G, P, 2]``, in 8 bits for narrow codes: uint8, 128 too high,
    ``[C, G, (P + 1) / 2 * 4]``, and what 1 of them is, fp32 ``[C, G]``."""
    flat = weights.flatten(2).float()
    units = torch.nn.functional.pad(flat.abs(), (0, 1), value=1.0).amax(-1) / 127
    numbers = (flat / units[..., None]).round()
    whole = torch.nn.functional.pad(numbers, (0, flat.shape[-1] % 4)) + 128
    return whole.to(torch.uint8).contiguous(), units


def _up_to(x: Tensor, size: int) -> Tensor:
    """Rows ``[..., D]`` with zeros up to ``size``."""
    return torch.nn.functional.pad(x, (0, size - x.shape[-1])).contiguous()


class RankedAttention(RebuiltAttention):
    """Attends over one layer of ranked codes."""

    def __init__(self, layer: "CompressedLayer", isa: str, rope: RopeTable) -> None:
        codec = layer.codec.rematerialized
        assert codec is not None
        self._call = RankedCall(codec, layer.stream.block, isa)
        super().__init__(layer, rope, self._call.to.attend, self._call.sources)

    def _attend(self, call: AttentionCall, angles: RopeAngles | None) -> Tensor:
        to, query = self._to, call.query
        batch, heads, queries, size = query.shape
        if self._layer.stream.tokens:
            packed = self._packed_angles(angles)
            self._call.turn(packed, to.group_heads * queries)
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = query.new_empty(batch, queries, heads, size)
        to.dtype, to.scaling = native.DTYPES[query.dtype], call.scaling
        to.query, to.out = query.data_ptr(), out.data_ptr()
        to.query_batch, to.query_head, to.query_token = query.stride()[:3]
        to.out_batch, to.out_token, to.out_head = out.stride()[:3]
        self._call.run()
        return out


class RankedPages(LibraryPages):
    """Attends over one layer of ranked codes in an engine's pages."""

    def __init__(
        self,
        codec: Rematerialized,
        layout: PageLayout,
        isa: str,
        scaling: float,
        softcap: float,
        angles: PagedAngles,
    ) -> None:
        self._ranked = RankedCall(codec, layout.block, isa)
        to = self._ranked.to.attend
        describe_heads(to, codec.view, layout.block)
        super().__init__(codec, layout, to, self._ranked.sources, scaling, softcap)
        self._angles = of_pages(angles)

    def _run(self) -> None:
        to = self._ranked.to.attend
        self._ranked.turn(self._angles, to.group_heads * to.queries)
        self._ranked.run()

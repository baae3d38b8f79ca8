"""Attention over keys and values that are rebuilt from ranked codes, by the native library: csrc/ranked.h.

Keys are ``W_k x + m_k`` and values ``W_v x + m_v``, of which ``x`` is read from its codes once for both. A
second segment has states that only values are products of.
"""

from functools import cache

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.codec import Rematerialized
from ...past.sequences import Sequences
from ...quant.operand import RankedOperand
from ...quant.ranked import level_table
from ...quant.steps import size_table
from ..call import AttentionCall
from ..slow import SlowPairs, widened
from . import library as native
from .turning import RebuildingKernel, in_pairs

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


class RankedKernel(RebuildingKernel):
    """Attends over ranked codes."""

    repeats = True

    def __init__(self, codec: Rematerialized, block: int, isa: str) -> None:
        assert codec.key_bias is not None and codec.value_bias is not None
        self._asked = call = native.RankedAttend()
        sources = dict(zip(range(len(codec.segments)), (call.states, call.more), strict=False))
        super().__init__(call.attend, sources, codec.view, block, call.turning)
        self._codec, self._function = codec, native.function("ranked_attend", isa)
        (sizes, zero), (levels, highest) = size_table(), level_words()
        for number, states in sources.items():
            segment = codec.segments[number]
            operand = segment.operand(block)
            assert isinstance(operand, RankedOperand)
            states.usual = native.address(operand.usual, torch.int16, segment.channels)
            states.sizes = sizes[zero:].data_ptr()
            states.levels, states.highest_level = levels.data_ptr(), highest.data_ptr()
            states.counts[:] = operand.counts
            states.block, states.channels = block, segment.channels
        width, channels = codec.view.kv_width, call.states.channels + call.more.channels
        value, mean = codec.value_weight, codec.value_bias.float().contiguous()
        # Keys come from a copy in another order.
        native.address(codec.key_weight, value.dtype, width, call.states.channels)
        call.value_weight = native.address(value, value.dtype, width, channels)
        call.value_dtype = native.DTYPES[value.dtype]
        call.value_mean = native.address(mean, torch.float32, width)
        self._constant = [codec.segments, sizes, levels, highest, value, mean]

    def attend(self, call: AttentionCall, out: Tensor, sequences: Sequences | None = None) -> None:
        self._point_to_angles()
        kept = self._point_to_scores(call)
        self._point_to_states(call.query, out, call.scaling)
        self._run()
        del kept  # the library has read it

    def _use_weights(self, slow: SlowPairs | None) -> None:
        call, prepared, built = self._asked, self._codec.prepared, self._turning.built
        name = "ranked keys" if slow is None else f"ranked keys from {built}"
        if name not in prepared:
            prepared[name] = self._prepare(built)
        self._weights = prepared[name]
        call.weights, call.weight_scale, call.mean, *of_slow = (t.data_ptr() for t in self._weights)
        call.slow_weights, call.slow_bytes, call.slow_units, call.slow_norm, call.slow_mean = of_slow

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

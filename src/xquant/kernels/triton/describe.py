"""What a kernel is compiled for: how keys or values of a layer are packed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...quant import Segment
from ...quant.operand import Operand

TILE, CHANNEL, TOKEN = 0, 1, 2
"""How far a range reaches in the block of a head: less than along an axis, all tokens of a channel, all
channels of a token. As in `unpack`."""


@dataclass(frozen=True)
class Side:
    """The keys or the values of a layer: an `Operand` with its tables on the device, and how far its ranges
    reach in a head."""

    operand: Operand
    span: int
    levels: Tensor | None
    fixed: tuple[Tensor, Tensor] | None  # scale and zero [C] of all blocks

    def constants(self, name: str) -> dict[str, Any]:
        """As the kernel takes them."""
        return {
            f"{name}_BITS": self.operand.bits,
            f"{name}_TABLE": self.levels is not None,
            f"{name}_PER_TOKEN": self.operand.per_token,
            f"{name}_SPAN": self.span,
            f"{name}_GROUP": self.operand.group,
            f"{name}_SPARSE": self.operand.count_bytes,
        }


def side(segment: Segment, block: int, head: int, device: torch.device) -> Side:
    """Of heads of ``head`` channels in blocks of ``block`` tokens."""
    operand = segment.operand(block)
    assert isinstance(operand, Operand)
    group, levels, fixed = operand.group, operand.levels, operand.offline
    if fixed is not None:
        span = CHANNEL
    elif operand.per_token:
        starts = range(0, segment.channels, head)
        whole = all(first // group == (first + head - 1) // group for first in starts)
        span = TOKEN if whole else TILE
    else:
        span = CHANNEL if group >= block else TILE
    if levels is not None:
        levels = levels.to(device).half().contiguous()
    if fixed is not None:
        scale, zero = (t.to(device).contiguous() for t in fixed)
        fixed = scale, zero
    return Side(operand, span, levels, fixed)

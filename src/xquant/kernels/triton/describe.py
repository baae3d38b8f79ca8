"""What a kernel is compiled for: how keys or values of a layer are packed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...quant import Codebook, Segment

TILE, CHANNEL, TOKEN = 0, 1, 2
"""How far a range reaches in the block of a head: less than along an axis, all tokens of a channel, all
channels of a token. As in `unpack`."""


@dataclass(frozen=True)
class Side:
    """The keys or the values of a layer."""

    bits: int
    per_token: bool
    group: int
    span: int
    sparse: int  # bytes of an outlier count, 0 where there are none
    levels: Tensor | None
    fixed: tuple[Tensor, Tensor] | None  # scale and zero [C] of all blocks

    def constants(self, name: str) -> dict[str, Any]:
        """As the kernel takes them."""
        return {
            f"{name}_BITS": self.bits,
            f"{name}_TABLE": self.levels is not None,
            f"{name}_PER_TOKEN": self.per_token,
            f"{name}_SPAN": self.span,
            f"{name}_GROUP": self.group,
            f"{name}_SPARSE": self.sparse,
        }


def side(segment: Segment, block: int, head: int, device: torch.device) -> Side:
    """Of heads of ``head`` channels in blocks of ``block`` tokens."""
    quantizer: Any = segment.quantizer
    by_token = quantizer.per == "token"
    group = quantizer.range_size(segment.channels if by_token else block)
    if by_token:
        starts = range(0, segment.channels, head)
        whole = all(first // group == (first + head - 1) // group for first in starts)
        span = TOKEN if whole else TILE
    else:
        span = CHANNEL if group >= block else TILE
    if not isinstance(quantizer, Codebook):
        return Side(quantizer.bits, by_token, group, span, 0, None, None)
    levels = quantizer.levels.to(device).half().contiguous()
    fixed = quantizer.offline_ranges()
    if fixed is not None:
        scale, zero = (t.to(device).contiguous() for t in fixed)
        span, fixed = CHANNEL, (scale, zero)
    counted = 1 if segment.channels < 256 else 2
    sparse = counted if quantizer.sparse else 0
    return Side(quantizer.bits, by_token, group, span, sparse, levels, fixed)

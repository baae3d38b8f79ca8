"""Matrices as the kernels of `rebuild` multiply with them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...quant import Segment
from .operand import KernelOperand
from .support import affine, power

CHUNK = 64
"""Channels that are multiplied at a time."""


@dataclass(frozen=True)
class Coded:
    """How the states that a matrix is multiplied with are packed, in tiles whose lanes are tokens."""

    tile: int
    bits: int
    per_token: bool
    span: int
    group: int

    @classmethod
    def of(cls, segment: Segment, block: int, device: torch.device) -> "Coded":
        """``segment`` as `support.tiled` allows it."""
        operand = affine(segment, block)
        assert operand is not None and operand.tile is not None
        head = operand.tile.head
        span = KernelOperand.of(segment, block, head, device).span
        return cls(head, operand.bits, operand.per_token, span, operand.group)

    @property
    def chunk(self) -> int:
        return min(CHUNK, power(self.tile))

    def places(self) -> Tensor:
        """The channels of a tile chunk by chunk, in the order of `unpack.coded`; -1 where there is none."""
        width = min(self.bits & -self.bits, 4)
        run, part = self.tile * width // 8, self.chunk * width // 8
        within = torch.arange(-(-self.tile // self.chunk) * part).view(-1, 1, part)
        channels = torch.arange(8 // width)[:, None] * run + within
        if self.tile == self.chunk:
            channels = torch.arange(self.tile).view(1, 1, -1)
        found = channels.where(within < run, -1) if self.tile != self.chunk else channels
        even_first = found.flatten(1).unflatten(1, (-1, 2)).mT
        return even_first.flatten()

    def constants(self) -> dict[str, Any]:
        """As the kernels take them."""
        return {
            "TILE": self.tile,
            "BITS": self.bits,
            "PER_TOKEN": self.per_token,
            "SPAN": self.span,
            "GROUP": self.group,
            "CHUNK": self.chunk,
        }


def by_chunk(weight: Tensor, coded: Coded | None) -> tuple[Tensor, Tensor]:
    """A matrix ``[M, C]`` chunk by chunk, in the order in which codes lie, each row divided by its unit,
    and the units fp32 ``[M]``.

    In fp16, whose range a row fills, to no loss where it was in bf16; beside rows in bf16 (``coded`` is
    None) as it is.
    """
    if coded is None:
        weight = torch.nn.functional.pad(weight, (0, -weight.shape[1] % CHUNK))
    else:
        places = coded.places().to(weight.device)
        tiles = weight.unflatten(1, (-1, coded.tile))
        found = tiles[..., places.clamp(min=0)].masked_fill(places < 0, 0)
        weight = found.flatten(1)
    if coded is None and weight.dtype == torch.bfloat16:
        return weight.contiguous(), torch.ones(len(weight), device=weight.device)
    highest = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    unit = highest.log2().ceil().exp2()
    return (weight.float() / unit[:, None]).half().contiguous(), unit

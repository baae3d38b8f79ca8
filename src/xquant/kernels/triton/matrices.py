"""Matrices that packed states are multiplied with, in the order in which the codes lie."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...quant import Segment
from .arguments import Matrix
from .operand import KernelOperand, Layout
from .support import affine, power

CHUNK = 64
"""Channels that are multiplied at a time."""


@dataclass(frozen=True)
class PackedStates:
    """How the states that a matrix is multiplied with are packed: in tiles of ``tile`` channels, whose
    lanes are tokens."""

    tile: int
    layout: Layout

    @classmethod
    def of(cls, segment: Segment, block: int, device: torch.device) -> "PackedStates":
        """Of blocks of ``block`` tokens; ``segment`` as `support.tiled` allows it."""
        operand = affine(segment, block)
        assert operand is not None and operand.tile is not None
        tile = operand.tile.head
        return cls(tile, KernelOperand.of(segment, block, tile, device).layout)

    @property
    def chunk(self) -> int:
        return min(CHUNK, power(self.tile))

    def order(self) -> Tensor:
        """The channels of a tile chunk by chunk, in the order of `codes.tile_order`; -1 where there is
        none."""
        bits = self.layout.bits
        width = min(bits & -bits, 4)
        run, part = self.tile * width // 8, self.chunk * width // 8
        within = torch.arange(-(-self.tile // self.chunk) * part, device="cpu").view(-1, 1, part)
        channels = torch.arange(8 // width, device="cpu")[:, None] * run + within
        if self.tile == self.chunk:
            channels = torch.arange(self.tile, device="cpu").view(1, 1, -1)
        found = channels.where(within < run, -1) if self.tile != self.chunk else channels
        even_first = found.flatten(1).unflatten(1, (-1, 2)).mT
        return even_first.flatten()

    def constants(self) -> dict[str, Any]:
        """The arguments that kernels are compiled for."""
        return {"TILE": self.tile, "LAYOUT": self.layout, "CHUNK": self.chunk}


def by_chunk(weight: Tensor, states: PackedStates | None) -> Matrix:
    """A matrix ``[M, C]`` chunk by chunk, in the order in which the codes of ``states`` lie, each row
    divided by its unit.

    In fp16, whose range a row fills, to no loss where it was in bf16. Where states are not packed (None), a
    matrix in bf16 stays as it is.
    """
    if states is None:
        weight = torch.nn.functional.pad(weight, (0, -weight.shape[1] % CHUNK))
    else:
        order = states.order().to(weight.device)
        tiles = weight.unflatten(1, (-1, states.tile))
        ordered = tiles[..., order.clamp(min=0)].masked_fill(order < 0, 0)
        weight = ordered.flatten(1)
    if states is None and weight.dtype == torch.bfloat16:
        return Matrix(weight.contiguous(), torch.ones(len(weight), device=weight.device, dtype=torch.float32))
    highest = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    unit = highest.log2().ceil().exp2()
    return Matrix((weight.float() / unit[:, None]).half().contiguous(), unit)

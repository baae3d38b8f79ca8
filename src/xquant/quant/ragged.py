"""Ragged: a packed tensor whose blocks differ in length."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Ragged:
    """A tensor ``[K_i]`` for each block, in memory of its own: growing copies nothing that is there."""

    def __init__(self, blocks: Iterable[Tensor]) -> None:
        self.blocks = tuple(blocks)

    @classmethod
    def split(cls, flat: Tensor, lengths: Tensor) -> "Ragged":
        """Cut ``flat`` ``[sum K_i]`` into blocks of ``lengths`` ``[N]``."""
        return cls(block.clone() for block in flat.split(lengths.tolist()))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, blocks: Tensor) -> "Ragged":
        return Ragged(self.blocks[i] for i in blocks.tolist())

    def __add__(self, other: "Ragged") -> "Ragged":
        return Ragged(self.blocks + other.blocks)

    def first(self, count: int) -> "Ragged":
        """The first ``count`` blocks."""
        return Ragged(self.blocks[:count])

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Ragged":
        """The same blocks where ``move`` puts them."""
        return Ragged(map(move, self.blocks))

    def flat(self) -> Tensor:
        """All blocks after each other."""
        return torch.cat(self.blocks)

    @property
    def addresses(self) -> Tensor:
        """Where each block lies, int64 ``[N]``."""
        return torch.tensor([block.data_ptr() for block in self.blocks], dtype=torch.int64, device="cpu")

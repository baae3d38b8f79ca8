"""Ragged: a packed tensor whose blocks differ in length."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Ragged:
    """One run ``[K_i]`` a block, each in memory of its own: growing copies nothing that is there."""

    def __init__(self, runs: Iterable[Tensor]) -> None:
        self.runs = tuple(runs)

    @classmethod
    def split(cls, flat: Tensor, lengths: Tensor) -> "Ragged":
        """Cut ``flat`` ``[sum K_i]`` into runs of ``lengths`` ``[N]``."""
        return cls(run.clone() for run in flat.split(lengths.tolist()))

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, blocks: Tensor) -> "Ragged":
        return Ragged(self.runs[i] for i in blocks.tolist())

    def __add__(self, other: "Ragged") -> "Ragged":
        return Ragged(self.runs + other.runs)

    def first(self, count: int) -> "Ragged":
        """The first ``count`` blocks."""
        return Ragged(self.runs[:count])

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Ragged":
        """The same blocks where ``move`` puts them."""
        return Ragged(map(move, self.runs))

    def flat(self) -> Tensor:
        """All runs after each other."""
        return torch.cat(self.runs)

    @property
    def addresses(self) -> Tensor:
        """Where each run lies, int64 ``[N]``."""
        return torch.tensor([run.data_ptr() for run in self.runs], dtype=torch.int64, device="cpu")

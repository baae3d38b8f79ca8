"""BatchLayout: where the tokens of a batch lie in pages and rings, and how many there are."""

import copy
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .sequences import FixedSequences, Sequences
from .step import Chunk, NewTokens, Retention, Step, Whereabouts

State = tuple[Tensor, list[int], list[int]]
EMPTY: State = torch.ones(0, 0, dtype=torch.bool, device="cpu"), [], []


class BatchLayout:
    """The tokens of ``B`` sequences, each with pages and a ring of its own.

    Padding has no place: a sequence's tokens are those that are not.

    Args:
        batch: ``B``.
        room: tokens that a sequence may have, padding included.
        retention: which tokens lie where.
        device: where kernels read `Sequences`.
    """

    def __init__(self, batch: int, room: int, retention: Retention, device: torch.device) -> None:
        self.retention, self._device = retention, device
        self.columns = -(-room // retention.block)
        """Pages of a sequence."""
        self._table = torch.arange(batch * self.columns, dtype=torch.int32, device="cpu").view(batch, -1)
        self._batch = batch
        self._fixed = FixedSequences(device, batch)
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.real = torch.ones(self._batch, 0, dtype=torch.bool, device="cpu")
        """``[B, T]`` on the CPU; False for padding."""
        self._lengths = [0] * self._batch
        self._written = list(self._lengths)  # the most that each ring was given

    @property
    def batch(self) -> int:
        return len(self.real)

    @property
    def length(self) -> int:
        """``T``, padding included."""
        return self.real.shape[1]

    @property
    def most(self) -> int:
        """The most tokens that rings were given: more than `length` after a crop, or a step that failed."""
        return self.length + max(a - b for a, b in zip(self._written, self._lengths, strict=True))

    # -- a forward pass ----------------------------------------------------------------------------

    def begin(self, new: Tensor) -> None:
        """New tokens come, bool ``[B, t]``; False for padding."""
        self.new = new
        self._counts = new.sum(1).tolist()
        starts = [0, *accumulate(self._counts)]
        self.members = [b for b, count in enumerate(self._counts) if count]
        """The sequences with new tokens that are no padding, in the order of `step`."""
        new_tokens = [
            NewTokens(starts[b], starts[b] + self._counts[b], self._lengths[b]) for b in self.members
        ]
        self.step = self._step(self.members, new_tokens)

    def _step(self, members: list[int], new_tokens: list[NewTokens]) -> Step:
        """Of these sequences."""
        table = self._table if len(members) == self._batch else self._table[members]
        at = Whereabouts.of(new_tokens, members, table)
        return Step(new_tokens, at, self.retention, self._fixed)

    def held(self) -> list[tuple[int, Chunk]]:
        """The sequences that have tokens, and where all of those lie."""
        members = [b for b, length in enumerate(self._lengths) if length]
        new_tokens = [NewTokens(0, 0, self._lengths[b]) for b in members]
        chunks = self._step(members, new_tokens).readers(native=False)[1]
        return list(zip(members, chunks.each, strict=True))

    def _write(self) -> None:
        """Rings are given the new tokens."""
        ends = zip(self._written, self._lengths, self._counts, strict=True)
        self._written = [max(most, length + count) for most, length, count in ends]

    def sequences(self) -> Sequences:
        """What kernels read in this step; they give the new tokens to rings."""
        self._write()
        (own,), _ = self.step.readers(native=True)
        return own

    def advance(self) -> None:
        """The new tokens are held from now on, and rings have them."""
        self._write()
        self.real = torch.cat([self.real, self.new], 1)
        self._lengths = [a + b for a, b in zip(self._lengths, self._counts, strict=True)]

    def copied(self) -> "BatchLayout":
        """The same tokens, for a cache of its own."""
        other: BatchLayout = copy.deepcopy(self)
        other._fixed = FixedSequences(self._device, self._batch)
        return other

    # -- and back ------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        return self.real, self._lengths, self._written

    def restore(self, state: State, rings: bool) -> None:
        """Hold what was held at the time of a `snapshot`; ``rings``: they have what they had then, too."""
        self.real, self._lengths, written = state
        if rings:
            self._written = written

    def without(self, tokens: int) -> State | None:
        """As `snapshot` after the newest ``tokens`` are dropped; None where rings no longer have what is read
        of them then."""
        real = self.real[:, : self.length - tokens].clone()
        lengths = real.sum(1, dtype=torch.int32).numpy()
        read = self.retention.sealed(lengths, lengths, np.zeros_like(lengths))
        gone = read < np.array(self._written) - self.retention.capacity
        return None if gone.any() else (real, lengths.tolist(), self._written)

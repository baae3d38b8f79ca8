"""BatchLayout: where the tokens of a batch lie in pages and rings, and how many there are."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from .sequences import Sequences
from .step import Chunk, NewTokens, Retention, Step

State = tuple[Tensor, list[int], list[int]]
EMPTY: State = torch.ones(0, 0, dtype=torch.bool, device="cpu"), [], []
_MOVING = "limits", "held", "new", "sinks"
"""What of `Sequences` changes from step to step, beside what only the host asks."""


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
        self._rings = torch.arange(batch, device="cpu")
        self._fixed: dict[int, Sequences] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.real = torch.ones(len(self._rings), 0, dtype=torch.bool, device="cpu")
        """``[B, T]`` on the CPU; False for padding."""
        self._lengths = [0] * len(self._rings)
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
        everyone = len(new_tokens) == len(new)
        members: slice | list[int] = slice(None) if everyone else self.members
        self.step = Step(new_tokens, self._table[members], self._rings[members], self.retention)

    def held(self) -> list[tuple[int, Chunk]]:
        """The sequences that have tokens, and where all of those lie."""
        members = [b for b, length in enumerate(self._lengths) if length]
        new_tokens = [NewTokens(0, 0, self._lengths[b]) for b in members]
        step = Step(new_tokens, self._table[members], self._rings[members], self.retention)
        return list(zip(members, step.readers(native=False)[1].each, strict=True))

    def _write(self) -> None:
        """Rings are given the new tokens."""
        ends = zip(self._written, self._lengths, self._counts, strict=True)
        self._written = [max(most, length + count) for most, length, count in ends]

    @torch.inference_mode(False)  # what is made within it could not be written to outside
    def sequences(self) -> Sequences:
        """What kernels read in this step, at one address in all steps of as many tokens; they give the
        new ones to rings."""
        self._write()
        (own,), _ = self.step.readers(native=True)
        held = self._fixed.get(own.queries)
        if held is None:
            held = replace(
                own,
                first=self._own(own.first),
                table=self._own(own.table),
                limits=self._own(own.limits),
                held=self._own(own.held),
                new=self._own(own.new),
                sinks=None if own.sinks is None else self._own(own.sinks),
            )
            self._fixed[own.queries] = held
        else:
            for name in _MOVING:
                if (tensor := getattr(held, name)) is not None:
                    tensor.copy_(getattr(own, name), non_blocking=True)
        return replace(held, most_held=own.most_held)

    def _own(self, numbers: Tensor) -> Tensor:
        return numbers.clone().to(self._device)

    def advance(self) -> None:
        """The new tokens are held from now on, and rings have them."""
        self._write()
        self.real = torch.cat([self.real, self.new], 1)
        self._lengths = [a + b for a, b in zip(self._lengths, self._counts, strict=True)]

    def copied(self) -> "BatchLayout":
        """The same tokens, for a cache of its own."""
        other: BatchLayout = copy.deepcopy(self)
        other._fixed = {}
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
        lengths: Sequence[int] = real.sum(1).tolist()
        capacity = self.retention.capacity
        for length, written in zip(lengths, self._written, strict=True):
            if self.retention.sealed(NewTokens(0, 0, length)) < written - capacity:
                return None
        return real, list(lengths), self._written

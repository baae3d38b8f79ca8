"""Attention over pages: what an engine's sequences have in their blocks, their rings and their new rows.

Letters: ``B`` sequences, ``T`` new tokens of all sequences that an engine runs, these and others; ``t`` new
tokens of one; ``n`` tokens of a block; ``R`` places of a ring.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..models.rope import Pair
from .rope import Within


@dataclass(frozen=True)
class PagedAngles:
    """cos and sin of positions, fp32, for keys that are kept before RoPE."""

    within: Within
    """Of the places of a block."""
    starts: Pair
    """``[columns, D / 2]`` of the positions that blocks start at."""
    every: Pair
    """``[positions, D / 2]``."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of unequal length with as many new tokens each: what one forward pass asks of every layer."""

    queries: int
    """``t``."""
    block: int
    """``n``."""
    capacity: int
    """``R``."""
    first: Tensor
    """int32 ``[B]``: the first new token of each among the ``T``."""
    table: Tensor
    """int32 ``[B, .]``: the page of every block."""
    limits: Tensor
    """int32 ``[B]``: tokens that are read from pages."""
    held: Tensor
    """int32 ``[B, 4]``: the ring of each sequence, where the first token that is read from it lies there, how
    many are read, and the place of the first in the sequence."""
    new: Tensor
    """int32 ``[B, 4]``: the same of the new tokens, which are rows of the ``T``."""
    most_held: int
    """The most tokens that are read from a ring."""

    @cached_property
    def columns(self) -> int:
        """Of the table, that are read for any sequence."""
        return (int(self.limits.max()) + self.block - 1) // self.block

    @cached_property
    def beyond(self) -> Tensor:
        """Which tokens of these columns are none of a sequence: bool ``[B, columns * n]``."""
        return torch.arange(self.columns * self.block) >= self.limits[:, None]

    @cached_property
    def rows(self) -> Tensor:
        """int64 ``[B, t]``: the new tokens among the ``T``."""
        return self.first[:, None].long() + torch.arange(self.queries)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """int64 ``[B, 1]`` and ``[B, most_held]``: rings, and the places in them that are read. Of a sequence
        that has fewer there, the last are others."""
        ring, first = self.held[:, :1].long(), self.held[:, 1:2].long()
        return ring, (first + torch.arange(self.most_held)) % self.capacity

    @cached_property
    def unseen(self) -> Tensor:
        """Which tokens of ring and new rows a new token does not see: bool ``[B, t, most_held + t]``."""
        held = torch.arange(self.most_held) >= self.held[:, 2:3]
        later = torch.ones(self.queries, self.queries, dtype=torch.bool).triu(1)
        absent = torch.arange(self.queries) >= self.new[:, 2:3]
        own = later | absent[:, None]
        return torch.cat([held[:, None].expand(-1, self.queries, -1), own], -1)


class PagedAttention(ABC):
    """Attends over one layer. Letters beside those above: ``W = 2 G D``."""

    @abstractmethod
    def bind(self, pages: Tensor, rings: Tensor) -> None:
        """Read the past from ``pages`` uint8 ``[N, .]`` and ``rings`` ``[M, R, W]``, rotated key beside
        value, until other memory is bound."""

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, out: Tensor
    ) -> None:
        """Attention of the new tokens of these sequences.

        Args:
            query: ``[T, H, D]``.
            key, value: ``[T, G, D]``, the key rotated.
            out: ``[T, H, D]``; the rows of these sequences are written.
        """

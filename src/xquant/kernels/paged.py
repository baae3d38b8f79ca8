"""Attention over pages: what an engine's sequences have in their blocks, their rings and their new rows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Sequences of unequal length with as many new tokens each: what one forward pass asks of every layer.

    Letters: ``B`` sequences, ``T`` new tokens of all sequences that the engine runs, these and others.
    """

    queries: int
    """New tokens of each sequence."""
    first: Tensor
    """int32 ``[B]``: the first of them among the ``T``."""
    table: Tensor
    """int32 ``[B, columns]``: the page of every block."""
    limits: Tensor
    """int32 ``[B]``: tokens that are read from pages."""
    held: Tensor
    """int32 ``[B, 4]``: the ring of each sequence, where the first token that is read from it lies there, how
    many are read, and the place of the first in the sequence."""
    new: Tensor
    """int32 ``[B, 4]``: the same of the new tokens, which are rows of the ``T``."""
    most_held: int
    """The most tokens that are read from a ring."""


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

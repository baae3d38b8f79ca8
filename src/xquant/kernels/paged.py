"""Attention over pages."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..past.sequences import Sequences
from .call import AttentionCall


class PagedAttention(ABC):
    """Attends over one layer. Letters as in `past.sequences`; ``W = 2 G D``."""

    repeats = False
    """Whether `repeat` can answer a call like the newest one."""

    @abstractmethod
    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        """Read the past from ``pages`` uint8 ``[N, .]``, ``rings`` ``[M, R, W]``, rotated key beside value,
        and ``sinks`` ``[slots, S, W]`` alike, until other memory is bound."""

    @abstractmethod
    def attend(self, call: AttentionCall, sequences: Sequences, out: Tensor) -> None:
        """Attention of the new tokens of these sequences, which are then put into their rings.

        Args:
            call: states of all ``T`` tokens, without a mask and sink logits.
            out: ``[T, H, D]``; the rows of these sequences are written.
        """

    def repeat(self, call: AttentionCall, sequences: Sequences, out: Tensor) -> None:
        """`attend` of a call that differs from the newest one in where its states lie, and in what these
        sequences, as many, read. They have one new token each: states ``[B, H, 1, D]`` are those of rows."""
        self.attend(call.by_row(), sequences, out.flatten(0, 1))

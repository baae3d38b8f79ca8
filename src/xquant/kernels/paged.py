"""Attention over pages."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..past.sequences import Sequences
from .call import AttentionCall


class PagedAttention(ABC):
    """Attends over one layer. Letters as in `past.sequences`; ``W = 2 G D``."""

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

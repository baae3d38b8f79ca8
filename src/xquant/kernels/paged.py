"""Attention over pages: what an engine's sequences have in their blocks, rings and sinks, and their new rows.

Letters: ``B`` sequences, ``T`` new tokens of all sequences that an engine runs, these and others; ``t`` new
tokens of one; ``n`` tokens of a block; ``R`` places of a ring.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..models.rotation import Pair
from .call import AttentionCall
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

    def of_blocks(self, device: torch.device) -> list[Tensor]:
        """cos and sin of the starts of blocks, then of the places within, on ``device``."""
        return [t.to(device).contiguous() for t in (*self.starts, *self.within.angles)]


@dataclass(frozen=True)
class Sequences:
    """Sequences of unequal length with as many new tokens each: what one forward pass asks of every layer."""

    queries: int
    """``t``."""
    block: int
    """``n``."""
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
    sinks: Tensor | None
    """int32 ``[B, 4]``: the same of sinks, in the slot of each sequence; None where the method has none."""
    sink: int
    """The most sinks of a sequence."""

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What backends made of it, for all layers."""
        return {}

    @cached_property
    def columns(self) -> int:
        """Of the table, that are read for any sequence."""
        return (int(self.limits.max()) + self.block - 1) // self.block

    @cached_property
    def sink_places(self) -> Tensor:
        """int32 ``[B, sink]``: the places of sinks in their sequence, -1 where their page is not read yet."""
        assert self.sinks is not None
        places = torch.arange(self.sink, dtype=torch.int32, device=self.sinks.device)
        return torch.where(self.sinks[:, 2:3] > 0, places, -1).int()

    @cached_property
    def rows(self) -> Tensor:
        """int64 ``[B, t]``: the new tokens among the ``T``."""
        following = torch.arange(self.queries, device=self.first.device)
        return self.first[:, None].long() + following


class PagedAttention(ABC):
    """Attends over one layer. Letters beside those above: ``W = 2 G D``."""

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

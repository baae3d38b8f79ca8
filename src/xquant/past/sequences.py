"""Sequences: what a kernel reads of many sequences in one forward pass, and where it lies in paged memory.

Letters: ``B`` sequences, ``T`` new tokens of all sequences that an engine runs, these and others; ``t`` new
tokens of one; ``n`` tokens of a block; ``R`` places of a ring.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

MOST_QUERIES = 16
"""Queries at a time that every kernel answers; more are a chunk of a prompt, which pays for rebuilding K and
V once."""


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

"""Sequences: what a kernel reads of many sequences in one forward pass, and where it lies in paged memory.

Letters: ``B`` sequences, ``T`` new tokens of all sequences that an engine runs, these and others; ``t`` new
tokens of one; ``n`` tokens of a block; ``R`` places of a ring.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = Tensor | np.ndarray[Any, np.dtype[np.int32]]
"""Of sequences: on the device that reads them, or on the host, in numpy, where the host makes them: of one
sequence torch takes five times as long."""

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
    sinks: Tensor | None
    """int32 ``[B, 4]``: the same of sinks, in the slot of each sequence; None where the method has none."""
    sink: int
    """The most sinks of a sequence."""

    @classmethod
    def of(cls, numbers: Tensor, table: Tensor, queries: int, block: int, sink: int) -> "Sequences":
        """Of ``numbers``, int32: ``first``, ``limits``, ``held``, ``new`` and, where there is a ``sink``,
        ``sinks``, after each other."""
        count = len(table)
        each = numbers[2 * count :].view(-1, count, 4)
        return cls(
            queries=queries,
            block=block,
            first=numbers[:count],
            table=table,
            limits=numbers[count : 2 * count],
            held=each[0],
            new=each[1],
            sinks=each[2] if sink else None,
            sink=sink,
        )

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


class FixedSequences:
    """Memory that a kernel finds `Sequences` in: the same in every step of as many sequences with as many new
    tokens. So what a device was told to do in one step, in a CUDA graph too, is right for the others.

    Args:
        device: where kernels read.
        most: sequences of a step.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most = device, most
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._found: dict[tuple[int, int], tuple[Tensor, Sequences]] = {}

    def put(self, numbers: Tensor, table: Tensor, queries: int, block: int, sink: int) -> Sequences:
        """As `Sequences.of`, there. It holds until the next are put."""
        count, columns = table.shape
        if (count, queries) not in self._found:
            if queries not in self._memory:
                self._memory[queries] = self._new(len(numbers) // count), self._new(columns)
            own, pages = self._memory[queries]
            own, pages = own[: len(numbers)], pages[: table.numel()].view(table.shape)
            self._found[count, queries] = own, Sequences.of(own, pages, queries, block, sink)
        memory, found = self._found[count, queries]
        memory.copy_(numbers, non_blocking=True)
        found.table.copy_(table, non_blocking=True)
        return replace(found)  # without what was worked out of the numbers before

    @torch.inference_mode(False)  # what is made within it could not be written to outside
    def _new(self, each: int) -> Tensor:
        return torch.zeros(self._most * each, dtype=torch.int32, device=self._device)

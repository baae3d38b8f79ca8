"""Step: one forward pass of an engine, worked out once for all of its layers.

Letters: ``T`` new tokens of all sequences, after each other; ``n`` tokens of a block; ``R`` places of a ring.
A token at position ``p`` lies in place ``p % R`` of its sequence's ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..methods import Method
from .noted import Noted
from .sequences import MOST_QUERIES, FixedSequences, Numbers, Sequences
from .slots import Slots


class NewTokens(NamedTuple):
    """The new tokens of one sequence in a step, as the host knows them."""

    start: int
    """Its first row among the ``T``."""
    stop: int
    before: int
    """Tokens that the sequence had before."""

    @property
    def after(self) -> int:
        return self.before + self.stop - self.start


class Whereabouts(NamedTuple):
    """The same of ``B`` sequences, and where their past lies: on the device that reads it, or on the host."""

    first: Numbers
    """int32 ``[B]``: the first new row of each."""
    before: Numbers
    """int32 ``[B]``: tokens that it had before."""
    rings: Numbers
    """int32 ``[B]``."""
    begun: Numbers
    """int32 ``[B, 2]``, of each ring: the first token that it was given, those before it are only in pages;
    and how many tokens its sequence was to read before it writes one."""
    table: Tensor
    """int32 ``[B, columns]``: the page of every block."""

    @classmethod
    def of(cls, new_tokens: Sequence[NewTokens], rings: Sequence[int], table: Tensor) -> "Whereabouts":
        """Of sequences whose rings have all of their tokens."""
        starts, befores = [tokens.start for tokens in new_tokens], [tokens.before for tokens in new_tokens]
        first, before, of = np.array([starts, befores, rings], np.int32)
        return cls(first, before, of, np.zeros((len(of), 2), np.int32), table)

    def chosen(self, numbers: list[int]) -> "Whereabouts":
        """Of these sequences."""
        if len(numbers) == len(self.first):
            return self
        each: Any = (t[numbers] for t in self)
        return Whereabouts(*each)


@dataclass(frozen=True)
class Retention:
    """Which tokens of a past lie in pages, which in a ring and which in slots of sinks. It is the same for
    all layers."""

    block: int
    """Tokens of a page, ``n``."""
    capacity: int
    """Of a ring, ``R``."""
    tail: int = 0
    """The newest tokens are read as they are, so many at least where the ring was given them."""
    through_store: bool = False
    """Whether tokens also read the codes of blocks that their own step completes."""
    slots: Slots | None = None
    """Of sinks; None where the method has none."""

    @classmethod
    def of(cls, method: Method, ahead: int, through_store: bool = False) -> "Retention":
        """That of a method. A ring has room for a block that is not whole, for recent tokens, and
        for as many as come ``ahead`` of what is known to stay: drafts, and tokens of a step that may fail."""
        slots = Slots(method.sink) if method.sink else None
        capacity = method.group + method.tail + ahead
        return cls(method.group, capacity, method.tail, through_store, slots)

    def width(self, row: int) -> int:
        """Of a ring, in an engine that gives it as many rows as a page has tokens: so much that ``R`` rows of
        ``row`` numbers fit. Were rings longer than pages, prefixes would be found only where both end."""
        return -(-self.capacity * row // self.block)

    def sealed(self, before: Numbers, after: Numbers, since: Numbers) -> Numbers:
        """How many tokens the new ones read from pages, of sequences ``[B]`` with so many tokens before them
        and with them, and rings that begin with token ``since``."""
        if self.through_store:
            return after // self.block * self.block
        return _library(before).maximum((before - self.tail) // self.block * self.block, since)


def in_whole_blocks(block: int, request: Any, new: int, *found: int) -> int:
    """How many of ``new`` tokens of a request a scheduler may take, so that chunks end where blocks end, but
    for the last: then what a token reads does not depend on how its prompt was cut. ``found``: tokens of the
    request that it need not compute, beside those it has."""
    start = request.num_computed_tokens + sum(found)
    end = start + new
    return new if end >= request.num_tokens else max(end // block * block - start, 0)


class Chunk(NamedTuple):
    """A sequence with too many new tokens for a kernel that reads pages, or without such a kernel."""

    new: NewTokens
    pages: Tensor
    """int64 ``[c]``: those that are read."""
    places: tuple[Tensor | int, Tensor]
    """Its ring, and int64 where the tokens lie there that are read."""
    sealed: int
    """Tokens that are read from pages."""
    slot: int | None
    """Of its sinks, where they are read apart from their page."""


@dataclass(frozen=True)
class Chunks:
    """The sequences of a step that no kernel reads."""

    each: list[Chunk]
    rows: Tensor
    """int64: their new tokens among the ``T``, after each other."""
    kept: Tensor
    """int64: those of the ``T`` that go into rings, and"""
    places: tuple[Tensor, Tensor]
    """where each goes: its ring and its place there."""

    @property
    def counts(self) -> list[int]:
        """New tokens of each."""
        return [chunk.new.stop - chunk.new.start for chunk in self.each]


_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")
NO_CHUNKS = Chunks([], _NONE, _NONE, (_NONE, _NONE))


@dataclass(frozen=True)
class Filled:
    """The ``m`` blocks that a step completes."""

    pages: Tensor
    """int64 ``[m]``: where each goes."""
    starts: Tensor
    """int64 ``[m]``: the positions that they start at."""
    slots: Tensor | None
    """int64: the slots of sinks of those that start a sequence; None without sinks."""
    rows: Tensor
    """int64 ``[m, n]``: their tokens among the ``T``; of those that came before, any."""
    rings: Tensor
    """int64 ``[m]``: of their sequences, and"""
    held: Tensor
    """int64 ``[m, n]``: the place there of every token that came before, and of the others once they are
    kept."""
    begun: Tensor
    """int64: of all ``m n`` tokens, those that came before."""


class Step:
    """Where new tokens go and what they read. Of a step in which sequences have few new tokens each and
    complete no block, the host asks the device nothing.

    Args:
        new_tokens: of the sequences that have new tokens.
        at: where those lie.
        retention: which tokens lie where.
        memory: where kernels find what they read; each step has memory of its own without.
    """

    def __init__(
        self,
        new_tokens: Sequence[NewTokens],
        at: Whereabouts,
        retention: Retention,
        memory: FixedSequences | None = None,
    ) -> None:
        self.new_tokens = new_tokens
        self.at, self._retention, self._memory = at, retention, memory
        self._grouped: dict[bool, tuple[list[Sequences], Chunks]] = {}
        self.filled = self._find_filled()
        """The blocks that are completed, if any are."""

    def readers(self, native: bool) -> tuple[list[Sequences], Chunks]:
        """The sequences for a kernel that reads pages, by their number of new tokens, and the others. All are
        others without a ``native`` kernel. With `Retention.through_store` so are prompts, even where a single
        token of one is left: then what a token reads, and by what function, does not depend on chunks."""
        if native not in self._grouped:
            few: dict[int, list[int]] = {}
            rest = []
            store = self._retention.through_store
            most = 1 if store else MOST_QUERIES
            for number, tokens in enumerate(self.new_tokens):
                count = tokens.stop - tokens.start
                if native and count <= most and not (store and tokens.before < self._begun[number][1]):
                    few.setdefault(count, []).append(number)
                else:
                    rest.append(number)
            sequences = [self._sequences(numbers, count) for count, numbers in few.items()]
            self._grouped[native] = sequences, self._chunks(rest) if rest else NO_CHUNKS
        return self._grouped[native]

    def _find_filled(self) -> Filled | None:
        block = self._retention.block
        of, starts, first_rows = [], [], []
        for number, tokens in enumerate(self.new_tokens):
            for start in range(tokens.before // block * block, tokens.after // block * block, block):
                of.append(number)
                starts.append(start)
                first_rows.append(tokens.start - tokens.before + start)
        if not of:
            return None
        pages = self.at.table[of, [start // block for start in starts]].long()
        within = torch.arange(block, device="cpu")
        positions = _int64(starts)[:, None] + within
        befores = _int64([self.new_tokens[number].before for number in of])
        begun = (positions < befores[:, None]).flatten().nonzero()[:, 0]
        rings = _tensor(self.at.rings[of]).long()
        held = positions % self._retention.capacity
        rows = (_int64(first_rows)[:, None] + within).clamp(min=0)
        slots = self._retention.slots
        written = None if slots is None else _int64(slots.write(pages.tolist(), starts))
        return Filled(pages, _int64(starts), written, rows, rings, held, begun)

    # -- what the host has to know of chunks -----------------------------------------------------------

    @cached_property
    def _rings(self) -> list[int]:
        rings: list[int] = self.at.rings.tolist()
        return rings

    @cached_property
    def _begun(self) -> list[list[int]]:
        begun: list[list[int]] = self.at.begun.tolist()
        return begun

    @cached_property
    def _sealed(self) -> list[int]:
        before = np.array([tokens.before for tokens in self.new_tokens], np.int32)
        after = np.array([tokens.after for tokens in self.new_tokens], np.int32)
        since = np.array(self._begun, np.int32)[:, 0]
        sealed: list[int] = self._retention.sealed(before, after, since).tolist()
        return sealed

    def _places(self, number: int, start: int, stop: int) -> tuple[int, Tensor]:
        """Where tokens ``start`` to ``stop - 1`` of a sequence lie in its ring."""
        return self._rings[number], torch.arange(start, stop, device="cpu") % self._retention.capacity

    def _chunks(self, numbers: list[int]) -> Chunks:
        """These sequences. A ring is given as many of their new rows as it holds, the newest."""
        rows: list[int] = []
        kept: list[int] = []
        rings: list[int] = []
        places: list[int] = []
        for number in numbers:
            tokens = self.new_tokens[number]
            count = min(tokens.stop - tokens.start, self._retention.capacity)
            rows += range(tokens.start, tokens.stop)
            kept += range(tokens.stop - count, tokens.stop)
            rings += [self._rings[number]] * count
            places += range(tokens.after - count, tokens.after)
        where = _int64(rings), _int64(places) % self._retention.capacity
        return Chunks([self._chunk(n) for n in numbers], _int64(rows), _int64(kept), where)

    def _chunk(self, number: int) -> Chunk:
        tokens, sealed, slots = self.new_tokens[number], self._sealed[number], self._retention.slots
        pages = self.at.table[number, : sealed // self._retention.block].long()
        places = self._places(number, min(sealed, tokens.before), tokens.before)
        slot = slots.of(int(pages[0])) if slots is not None and sealed else None
        return Chunk(tokens, pages, places, sealed, slot)

    # -- what kernels read -----------------------------------------------------------------------------

    def _sequences(self, numbers: list[int], queries: int) -> Sequences:
        """Of as many new tokens each. All numbers are worked out where they are read."""
        capacity, slots = self._retention.capacity, self._retention.slots
        first, before, rings, begun, table = self.at.chosen(numbers)
        by = _library(before)
        nothing = 0 * before
        limits = self._retention.sealed(before, before + queries, begun[:, 0])
        start = by.minimum(limits, before)
        # A single token may be in a block that it has completed: the ring has it no more than the batch.
        runs = [rings, start % capacity, before - start, start]
        runs += [first, nothing, queries - (limits - start), before]
        sink = 0
        if slots is not None:
            pages, sink = table[:, 0] if by is torch else table[:, 0].numpy(), slots.sink
            there = limits > 0
            runs += [slots.of_pages(pages) * there, nothing, (nothing + sink) * there, nothing]
        of_each = by.stack(runs).reshape(-1, 4, len(first)).swapaxes(1, 2)
        numbers_of_all: Any = by.concatenate([first, limits, of_each.reshape(-1)])
        put = Sequences.of if self._memory is None else self._memory.put
        return put(_tensor(numbers_of_all), table, queries, self._retention.block, sink)


def _library(numbers: Numbers) -> Any:
    """What has the same functions for such numbers."""
    return torch if isinstance(numbers, Tensor) else np


def _tensor(numbers: Numbers) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers)


def _int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class Batch:
    """The sequences of a forward pass, as an engine says them to all layers that share a table of blocks. A
    batch may be filled up with sequences of no new tokens."""

    starts: Numbers
    """int32 ``[B + 1]``: the first new token of each among the ``T``, and the end of the last."""
    lengths: Numbers
    """int32 ``[B]``: tokens of each, with the new ones."""
    known: tuple[list[int], list[int]]
    """Both, as the host knows them."""
    table: Tensor
    """int ``[B, columns]``; of rings ``[B, 1]``."""
    memory: FixedSequences | None = None
    """As of `Step`, of layers whose rings are in this table. Layers with other rings have other memory: their
    turns come in between."""
    _made: "tuple[Batch, Step] | None" = None

    def step_of(self, pages: "Batch", retention: Retention, begun: Noted) -> Step:
        """The step of layers whose rings are in this table and whose pages are in the other; made once.

        Args:
            begun: of every ring, `Whereabouts.begun`.
        """
        if self._made is None or self._made[0] is not pages:
            self._made = pages, self._make_step(pages, retention, begun)
        return self._made[1]

    def _make_step(self, pages: "Batch", retention: Retention, begun: Noted) -> Step:
        starts, lengths = pages.known
        counted = zip(starts, starts[1:], lengths, strict=False)
        new = {
            number: NewTokens(start, stop, length - (stop - start))
            for number, (start, stop, length) in enumerate(counted)
            if stop > start
        }
        before, rings = pages.lengths - (pages.starts[1:] - pages.starts[:-1]), self.table[:, 0].int()
        own: Numbers = rings if isinstance(before, Tensor) else rings.numpy()
        at = Whereabouts(pages.starts[:-1], before, own, begun.of(own), pages.table.int())
        return Step([*new.values()], at.chosen([*new]), retention, self.memory)

"""Step: one forward pass of an engine, worked out once for all of its layers.

Letters: ``T`` new tokens of all sequences, after each other; ``n`` tokens of a block; ``R`` places of a ring.
A token at position ``p`` lies in place ``p % R`` of its sequence's ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..methods import Method
from .sequences import MOST_QUERIES, Sequences
from .slots import Slots


class NewTokens(NamedTuple):
    """The new tokens of one sequence in a step."""

    start: int
    """Its first row among the ``T``."""
    stop: int
    before: int
    """Tokens that the sequence had before."""
    since: int = 0
    """The first token that its ring was given: those before it are only in pages."""
    until: int = 0
    """Tokens that it had when it was given its ring: its prompt, the first of which are ``since``."""

    @property
    def after(self) -> int:
        return self.before + self.stop - self.start


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

    def sealed(self, tokens: NewTokens) -> int:
        """How many tokens the new ones read from pages."""
        if self.through_store:
            return tokens.after // self.block * self.block
        return max(tokens.since, (tokens.before - self.tail) // self.block * self.block, 0)


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
    prepared: dict[Any, Any] = field(default_factory=dict)
    """What an engine's attention has made of them for all layers."""


_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")
NO_CHUNKS = Chunks([], _NONE, _NONE, (_NONE, _NONE))


class Filled(NamedTuple):
    """The blocks that a sequence completes."""

    new: NewTokens
    places: tuple[Tensor | int, Tensor]
    """Its ring, and where the tokens of the first block lie there that were begun before."""
    blocks: int


class Step:
    """Where new tokens go and what they read.

    Args:
        new_tokens: of the sequences that have new tokens.
        pages: int ``[B, columns]``: the page of every block of each.
        rings: int ``[B]``: the ring of each.
        retention: which tokens lie where.
    """

    def __init__(
        self, new_tokens: Sequence[NewTokens], pages: Tensor, rings: Tensor, retention: Retention
    ) -> None:
        self._retention, self._table, self._rings = retention, pages.int(), rings.tolist()
        self.new_tokens = new_tokens
        self._find_filled()
        self._grouped: dict[bool, tuple[list[Sequences], Chunks]] = {}

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
                if native and count <= most and not (store and tokens.before < tokens.until):
                    few.setdefault(count, []).append(number)
                else:
                    rest.append(number)
            sequences = [self._sequences(numbers, count) for count, numbers in few.items()]
            self._grouped[native] = sequences, self._chunks(rest) if rest else NO_CHUNKS
        return self._grouped[native]

    def _find_filled(self) -> None:
        block = self._retention.block
        self.filled: list[Filled] = []
        pages, starts = [], []
        for number, tokens in enumerate(self.new_tokens):
            first, last = tokens.before // block, tokens.after // block
            if first < last:
                held = self._places(number, first * block, tokens.before)
                self.filled.append(Filled(tokens, held, last - first))
                pages.append(self._table[number, first:last])
                starts.append(torch.arange(first, last, device="cpu") * block)
        if pages:
            self.filled_pages = torch.cat(pages).long()
            """int64 ``[m]``: of the blocks that are completed, and"""
            self.filled_starts = torch.cat(starts)
            """the positions that they start at."""
            self.filled_slots: Tensor | None = None
            """int64: the slots of sinks of those that start a sequence; None without sinks."""
            if self._retention.slots is not None:
                written = self.filled_pages.tolist(), self.filled_starts.tolist()
                self.filled_slots = _int64(self._retention.slots.write(*written))

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
        tokens = self.new_tokens[number]
        sealed = self._retention.sealed(tokens)
        pages = self._table[number, : sealed // self._retention.block].long()
        places = self._places(number, min(sealed, tokens.before), tokens.before)
        return Chunk(tokens, pages, places, sealed, self._slot(number, sealed))

    def _slot(self, number: int, sealed: int) -> int | None:
        """Of the sinks of a sequence, once their page is read."""
        slots = self._retention.slots
        return slots.of(int(self._table[number, 0])) if slots is not None and sealed else None

    def _sequences(self, numbers: list[int], queries: int) -> Sequences:
        capacity, slots = self._retention.capacity, self._retention.slots
        new_tokens = [self.new_tokens[number] for number in numbers]
        limits, held, new, sinks = [], [], [], []
        for number, tokens in zip(numbers, new_tokens, strict=True):
            limit = self._retention.sealed(tokens)
            start = min(limit, tokens.before)
            limits.append(limit)
            held += [self._rings[number], start % capacity, tokens.before - start, start]
            # A single token may be in a block that it has completed: the ring has it no more than the batch.
            new += [tokens.start, 0, min(tokens.after - limit, queries), tokens.before]
            if slots is not None:
                slot = self._slot(number, limit)
                sinks += [0] * 4 if slot is None else [slot, 0, slots.sink, 0]
        # One tensor is made of all numbers: six would take five times as long.
        count = len(new_tokens)
        numbers_of = torch.tensor(
            [tokens.start for tokens in new_tokens] + limits + held + new + sinks,
            dtype=torch.int32,
            device="cpu",
        )
        by_sequence = numbers_of[2 * count :].view(-1, count, 4)
        everyone = count == len(self.new_tokens)
        return Sequences(
            queries=queries,
            block=self._retention.block,
            first=numbers_of[:count],
            table=self._table if everyone else self._table[numbers],
            limits=numbers_of[count : 2 * count],
            held=by_sequence[0],
            new=by_sequence[1],
            most_held=max(held[2::4]),
            sinks=None if slots is None else by_sequence[2],
            sink=0 if slots is None else slots.sink,
        )


def _int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class Batch:
    """The sequences of a forward pass, as an engine says them to all layers that share a table of blocks."""

    new_tokens: list[NewTokens]
    table: Tensor
    """int ``[B, columns]``; of rings ``[B, 1]``."""
    _made: "tuple[Batch, Step] | None" = None

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], table: Tensor) -> "Batch":
        """Of sequences whose new tokens begin at ``starts``, one number more than there are sequences, and
        that have ``lengths`` tokens with them. A batch may be filled up with sequences of no new tokens."""
        numbered = [
            (number, NewTokens(start, stop, length - (stop - start)))
            for number, (start, stop, length) in enumerate(zip(starts, starts[1:], lengths, strict=False))
            if stop > start
        ]
        own = [tokens for _, tokens in numbered]
        return cls(own, table if len(own) == len(table) else table[[number for number, _ in numbered]])

    def step_of(self, pages: "Batch", retention: Retention, begun: Mapping[int, tuple[int, int]]) -> Step:
        """The step of layers whose rings are in this table and whose pages are in the other; made once.
        ``begun``: of each ring, `NewTokens.since` and `NewTokens.until`."""
        if self._made is None or self._made[0] is not pages:
            rings = self.table[:, 0]
            new_tokens = []
            for tokens, ring in zip(pages.new_tokens, rings.tolist(), strict=True):
                since, until = begun.get(ring, (0, 0))
                new_tokens.append(tokens._replace(since=since, until=until))
            self._made = pages, Step(new_tokens, pages.table, rings, retention)
        return self._made[1]

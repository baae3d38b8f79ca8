"""Rotary angles as kernels take them: of the starts of blocks, of a few tokens, and a table of turns.

A key at position ``p + r`` of a block that starts at ``p`` is turned by ``R(p) R(r)``. The query takes
``R(p)`` once a block, so the key needs only ``R(r)``, the same small table for every block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..store.tokens import TokenIndex
from .cpu.library import turn_table

Pair = tuple[Tensor, Tensor]


@dataclass
class Angles:
    """Of the tokens of one layer in one forward pass; cos and sin are fp32 of half the head size."""

    turn: Tensor  # int16, see `turn_table`
    start: Pair  # [B, columns, D/2]
    tail: Pair  # [B, t, D/2]
    sinks: Pair  # [B, S, D/2]


def starts(index: TokenIndex, lengths: list[int]) -> Tensor | None:
    """Positions that the blocks start at, ``[B, columns]``; None where positions within a block do not
    follow each other."""
    sealed, device = sum(lengths), index.positions.device
    sizes = torch.tensor(lengths, dtype=torch.long, device=device)
    begin = sizes.cumsum(0) - sizes
    column = torch.arange(len(lengths), device=device).repeat_interleave(sizes)
    within = torch.arange(sealed, device=device) - begin[column]
    relative = index.positions[:, :sealed] - within
    real = index.real[:, :sealed]
    lowest = torch.iinfo(relative.dtype).min
    found = torch.full((len(relative), len(lengths)), lowest, dtype=relative.dtype, device=device)
    columns = column.expand_as(relative)
    found.scatter_reduce_(1, columns, relative.masked_fill(~real, lowest), "amax")
    if bool(((relative != found.gather(1, columns)) & real).any()):
        return None
    return found.masked_fill(found == lowest, 0)  # a block of padding alone is never seen


class AngleBook:
    """The angles of one forward pass, computed once for the layers that hold the same tokens."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._probe: Pair | None = None  # of position 1: tells one set of frequencies from another
        self._turn = torch.empty(0)
        self._starts: dict[tuple[int, int, int], tuple[Tensor | None, Pair | None]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what holds for one forward pass only."""
        self._found: dict[tuple[int, int], Angles | None] = {}

    def of(self, lengths: list[int], block: int, tail: int, sinks: Tensor | None) -> Angles | None:
        """Of a layer with blocks of these ``lengths``, ``tail`` more tokens and sinks in these columns
        ``[B, S]``; None where a block's positions do not follow each other."""
        if not self._index.uniform:  # one table of turns would not do
            return None
        sealed = sum(lengths)
        key = sealed, tail
        if key not in self._found:
            tokens = slice(sealed, sealed + tail)
            self._found[key] = self._compute(lengths, block, tokens, sinks)
        return self._found[key]

    def _compute(
        self, lengths: list[int], block: int, tail: slice, sinks: Tensor | None
    ) -> Angles | None:
        positions = self._index.positions
        kept = positions[:, :0]
        if sinks is not None:
            kept = positions.gather(1, sinks.long().clamp(min=0))
        probe = torch.ones_like(positions[:, :1])
        angles = self._pairs([probe, positions[:, tail], kept])
        cos, sin = (t[0, 0] for t in angles[0])
        if self._probe is None or not (
            torch.equal(cos, self._probe[0]) and torch.equal(sin, self._probe[1])
        ):
            self._probe = cos, sin
            self._starts.clear()
            self._turn = self._table(block)
        begin, start = self._start(lengths)
        if begin is None or start is None:
            return None
        return Angles(self._turn, start, angles[1], angles[2])

    def _start(self, lengths: list[int]) -> tuple[Tensor | None, Pair | None]:
        key = self._index.epoch, sum(lengths), len(lengths)
        if key not in self._starts:
            begin = starts(self._index, lengths)
            pair = None if begin is None else self._pairs([begin])[0]
            if len(self._starts) > 1:  # layers of one cache may differ by one block
                self._starts.pop(next(iter(self._starts)))
            self._starts[key] = begin, pair
        return self._starts[key]

    def _pairs(self, parts: list[Tensor]) -> list[Pair]:
        """cos and sin of positions ``[B, t]`` each."""
        cos, sin = self._index.rope_at(torch.cat(parts, 1))
        half = cos.shape[-1] // 2
        sizes = [part.shape[1] for part in parts]
        coses, sines = (t[..., :half].split(sizes, 1) for t in (cos, sin))
        return [(c.contiguous(), s.contiguous()) for c, s in zip(coses, sines, strict=True)]

    def _table(self, block: int) -> Tensor:
        base = torch.arange(block, dtype=torch.int32).expand(len(self._index.positions), -1)
        cos, sin = self._pairs([base])[0]
        # Some embeddings scale what they turn: that is left to the start of the block.
        factor = cos[0, 0, 0]
        return turn_table(cos[0] / factor, sin[0] / factor)

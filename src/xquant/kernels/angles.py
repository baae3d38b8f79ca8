"""Rotary angles as kernels take them: of the starts of blocks, of a few tokens, and a table of turns.

A key at position ``p + r`` of a block that starts at ``p`` is turned by ``R(p) R(r)``. The query takes
``R(p)`` once a block, so the key needs only ``R(r)``, the same small table for every block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tokens import TokenIndex
from .native import turn_table

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
    sizes = torch.tensor(lengths, device=device)
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
    return found.clamp(min=0)  # a block of padding alone is never seen


class AngleBook:
    """The angles of one forward pass, computed once for the layers that hold the same tokens."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._turned: tuple[Tensor, Tensor, Tensor] | None = (
            None  # cos, sin, the table made of them
        )
        self.clear()

    def clear(self) -> None:
        self._found: dict[tuple[int, int], Angles | None] = {}

    def of(self, lengths: list[int], block: int, tail: int, sinks: Tensor | None) -> Angles | None:
        """Of a layer with blocks of these ``lengths``, ``tail`` more tokens and sinks in these columns
        ``[B, S]``; None where a block's positions do not follow each other.

        One call of the model's rotary embedding serves all, so that one that depends on the longest
        position in use sees it.
        """
        sealed = sum(lengths)
        key = sealed, tail
        if key not in self._found:
            self._found[key] = self._compute(lengths, block, slice(sealed, sealed + tail), sinks)
        return self._found[key]

    def _compute(
        self, lengths: list[int], block: int, tail: slice, sinks: Tensor | None
    ) -> Angles | None:
        positions = self._index.positions
        begins = starts(self._index, lengths)
        if begins is None:
            return None
        none = positions[:, :0]
        kept = none if sinks is None else positions.gather(1, sinks.long().clamp(min=0))
        base = torch.arange(block, dtype=positions.dtype).expand(len(positions), -1)
        parts = [base, begins, positions[:, tail], kept, positions[:, -1:]]
        cos, sin = self._index.rope_at(torch.cat(parts, 1))
        half = cos.shape[-1] // 2
        sizes = [part.shape[1] for part in parts]
        pairs = [
            (c.contiguous(), s.contiguous())
            for c, s in zip(
                cos[..., :half].split(sizes, 1), sin[..., :half].split(sizes, 1), strict=True
            )
        ]
        return Angles(self._turn(*pairs[0]), pairs[1], pairs[2], pairs[3])

    def _turn(self, cos: Tensor, sin: Tensor) -> Tensor:
        # Some embeddings scale what they turn: that is left to the start of the block.
        factor = cos[0, 0, 0]
        cos, sin = cos[0] / factor, sin[0] / factor
        if self._turned is None or not (
            torch.equal(cos, self._turned[0]) and torch.equal(sin, self._turned[1])
        ):
            self._turned = cos, sin, turn_table(cos, sin)
        return self._turned[2]

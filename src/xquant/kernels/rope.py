"""RopeTable: cos and sin as kernels take them, computed once for the layers that hold the same tokens.

A key at position ``p + r`` of a block that starts at ``p`` is rotated by ``R(p) R(r)``. The query takes
``R(p)`` once a block, so the key needs only ``R(r)``, the same small table for every block.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..models.rotation import Pair
from ..past.angles import Within
from ..past.stream import Stream
from ..past.tokens import TokenIndex

if TYPE_CHECKING:
    from ..past.growing_layer import CompressedLayer


class BlockAngles(NamedTuple):
    """Of blocks alone."""

    within: Within
    start: Pair
    """``[B, columns, D/2]``, of one sequence where all have the same."""


@dataclass
class RopeAngles:
    """Of the tokens of one layer in one forward pass; cos and sin are fp32, of half the head size."""

    within: Within
    start: Pair  # of the blocks, [B, columns, D/2]
    tail: Pair  # [B, t, D/2]
    sinks: Pair  # [B, S, D/2]
    prepared: dict[str, Any] = field(default_factory=dict)
    """What backends have made of it."""


def starts(index: TokenIndex, lengths: list[int]) -> Tensor | None:
    """Positions that the blocks start at, ``[B, columns]``; None where positions within a block do not
    follow each other. Asks the device once."""
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


class RopeTable:
    """The angles of one forward pass, and those of the blocks, which last until other blocks are there."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._blocks: dict[tuple[int, int, int], tuple[Within, Pair] | None] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what holds for one forward pass only."""
        self._found: dict[tuple[int, int], RopeAngles | None] = {}

    def of(self, layer: "CompressedLayer", tail: int) -> RopeAngles | None:
        """Of the blocks of a layer, of ``tail`` more tokens and of its sinks. None where a block's positions
        do not follow each other, or tokens have frequencies of two sets (LongRoPE)."""
        key = layer.stream.tokens, tail
        if key not in self._found:
            self._found[key] = self._compute(layer, tail) if self._index.uniform else None
        return self._found[key]

    def _compute(self, layer: "CompressedLayer", tail: int) -> RopeAngles | None:
        blocks, sealed = self._of_blocks(layer.stream), layer.stream.tokens
        if blocks is None:
            return None
        positions = self._index.positions
        kept = positions[:, :0]
        if layer.sinks is not None:
            columns = layer.sinks.columns.to(positions.device)
            kept = positions.gather(1, columns.long().clamp(min=0))
        newest, exact = self._pairs([positions[:, sealed : sealed + tail], kept])
        return RopeAngles(*blocks, newest, exact)

    def _of_blocks(self, stream: Stream) -> tuple[Within, Pair] | None:
        key = self._index.epoch, stream.tokens, len(stream.lengths)
        if key not in self._blocks:
            if len(self._blocks) > 1:  # layers of one cache may differ by one block
                self._blocks.pop(next(iter(self._blocks)))
            begin = starts(self._index, stream.lengths)
            self._blocks[key] = None if begin is None else self._compute_blocks(begin, stream.block)
        return self._blocks[key]

    def _compute_blocks(self, begin: Tensor, block: int) -> tuple[Within, Pair]:
        within = torch.arange(block, dtype=begin.dtype, device=begin.device)
        start, (cos, sin) = self._pairs([begin, within.expand(len(begin), -1)])
        # Some embeddings scale what they rotate: that is left to the start of the block.
        factor = cos[0, 0, 0]
        return Within((cos[0] / factor, sin[0] / factor)), start

    def _pairs(self, parts: list[Tensor]) -> list[Pair]:
        """cos and sin of positions ``[B, t]`` each, ``[B, t, D/2]`` without gaps."""
        cos, sin = self._index.rope_at(torch.cat(parts, 1))
        half = cos.shape[-1] // 2
        sizes = [part.shape[1] for part in parts]
        coses, sines = (t[..., :half].split(sizes, 1) for t in (cos, sin))
        return [(c.contiguous(), s.contiguous()) for c, s in zip(coses, sines, strict=True)]

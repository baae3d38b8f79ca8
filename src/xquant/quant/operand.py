"""Operand: how the codes of a segment are packed, for kernels that multiply with them as they are."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from .pack import Tile


@dataclass(frozen=True, eq=False)
class Operand:
    """Codes with a scale and a zero per range: ``x = q * scale + zero``, with ``levels[q]`` in place of ``q``
    where there is a table of levels; times the second scale of the lane where there is one; and a residual
    added where outliers are stored apart."""

    channels: int
    """Of the segment, ``C``."""
    bits: int
    per_token: bool
    """Whether a range covers channels of one token; otherwise tokens of one channel."""
    group: int
    """Channels, or tokens, of a range."""
    tile: Tile | None
    levels: Tensor | None = None
    """fp16 or fp32 ``[2**bits]``, in [-1, 1]."""
    zero_scales: float | None = None
    """The zero of every range in its scales, where none is stored; scales may then be negative."""
    second: bool = False
    """Whether every lane (a token of keys, a channel of values) has a second scale."""
    offline: tuple[Tensor, Tensor] | None = None
    """Scale and zero, fp16 ``[C]``, of all blocks, where they are not stored with each."""
    count_bytes: int = 0
    """Of the number of a token's outliers; 0 where there are none."""

    @property
    def layout(self) -> Hashable:
        """The same for operands that one kernel reads, whatever is in their tables."""
        numbers = self.channels, self.bits, self.per_token, self.group, self.count_bytes
        tables = self.levels is None, self.zero_scales is None, self.second, self.offline is None
        return (*numbers, self.tile, *tables)


@dataclass(frozen=True, eq=False)
class RankedOperand:
    """Codes of 0 to 8 bits, by the rank of a channel's scale: see `ranked`."""

    usual: Tensor
    """int16 ``[C]``."""
    counts: tuple[int, ...]
    """Channels of each of `trellis.WIDTHS`."""

    @property
    def layout(self) -> Hashable:
        """As of `Operand`."""
        return len(self.usual)

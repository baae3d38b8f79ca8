"""What it takes to bring back keys and values of a token from its decoded row, as codecs say it.

Planning and benchmarks turn it into FLOPs and bytes (`analysis.roofline`).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Accumulator:
    """The sum of the rows of layers below, which a layer adds its own row to."""

    channels: int
    """Numbers of a token that are added."""
    nbytes: float
    """Of a token, in the bits that the method gives the accumulator."""
    moved: int
    """Bytes of a token that the layer reads and writes, in the dtype of the model."""


@dataclass(frozen=True)
class RebuildCost:
    """Products of one layer; None where there is none. Without any, keys and values are kept as they are."""

    keys: Tensor | None = None
    """``[G*D, Ck]``: every token's row is multiplied with it for keys, once for all query heads."""
    values: Tensor | None = None
    """``[G*D, Cv]``: what values are multiplied with. For each query head, a kernel first sums ``Cv`` numbers
    over all tokens, then multiplies the sums."""
    rows: Tensor | None = None
    """``[W, C]``: every token's decoded row is multiplied with it before anything else."""
    accumulator: Accumulator | None = None

    @property
    def matrices(self) -> list[Tensor]:
        """All there are."""
        return [m for m in (self.keys, self.values, self.rows) if m is not None]


NOTHING = RebuildCost()
"""Keys and values are what is decoded."""

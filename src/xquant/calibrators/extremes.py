"""Ranges of a stream of samples without its outliers, found without keeping the samples."""

import torch
from torch import Tensor

from ..quant.codebook import cut_ends, outlier_count


class Extremes:
    """The range of every channel that leaves a share of its elements outside, half of them at each end.

    Of every channel it keeps the smallest and the largest elements: one more at each end than there may be
    outliers among ``total`` elements.

    Args:
        share: of the elements that are left outside.
        total: elements that a channel will have.
    """

    def __init__(self, share: float, total: int) -> None:
        self.count = outlier_count(share, total)
        self.kept = self.count - self.count // 2 + 1
        self.smallest: Tensor | None = None  # [<= kept, C], ascending
        self.largest: Tensor | None = None  # descending

    def see(self, rows: Tensor) -> None:
        """Add elements, ``[T, C]``."""
        small = large = rows.float()
        if self.smallest is not None and self.largest is not None:
            small, large = torch.cat([self.smallest, small]), torch.cat([self.largest, large])
        keep = min(self.kept, len(small))
        self.smallest = small.topk(keep, 0, largest=False).values
        self.largest = large.topk(keep, 0).values

    def bounds(self) -> Tensor:
        """Lowest and highest inside, ``[2, C]``.

        Raises:
            ValueError: fewer elements were seen than the outliers alone would take.
        """
        if self.smallest is None or self.largest is None or len(self.smallest) < self.kept:
            raise ValueError("the calibration text is too short for its outliers: give more windows")
        return torch.cat(cut_ends(self.smallest, self.largest, 0, self.count))

"""Ranges of a stream of samples, outliers left out, without keeping the samples."""

import torch
from torch import Tensor

from ..quant.codebook import Bounds, outlier_count


class Extremes:
    """The narrowest range of every channel that leaves a share of its elements outside.

    Keeps, of every channel, the smallest and the largest elements seen, as many as the outliers of
    ``total`` elements may take and one.

    Args:
        share: of the elements that are left outside.
        total: elements a channel will have; more may come, fewer may not.
    """

    def __init__(self, share: float, total: int) -> None:
        self.count = outlier_count(share, total) if share else 0
        self.smallest: Tensor | None = None  # [<= count + 1, C], ascending
        self.largest: Tensor | None = None  # descending

    def see(self, rows: Tensor) -> None:
        """Add elements, ``[T, C]``."""
        rows = rows.float()
        if self.smallest is None or self.largest is None:
            small = large = rows
        else:
            small, large = torch.cat([self.smallest, rows]), torch.cat([self.largest, rows])
        keep = min(self.count + 1, len(small))
        self.smallest = small.topk(keep, 0, largest=False).values
        self.largest = large.topk(keep, 0).values

    def bounds(self) -> Bounds:
        """Lowest and highest inside, ``[C]`` each.

        Raises:
            ValueError: fewer elements were seen than the outliers alone would take.
        """
        if self.smallest is None or self.largest is None or len(self.smallest) <= self.count:
            raise ValueError(
                "the calibration text is too short for its outliers: give more windows"
            )
        width = self.largest.flip(0) - self.smallest
        best = width.argmin(0, keepdim=True)
        return self.smallest.gather(0, best)[0], self.largest.flip(0).gather(0, best)[0]

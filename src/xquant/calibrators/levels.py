"""Levels of a non-uniform datatype by weighted k-means (KVQuant, arXiv 2401.18079, equation 1), and ranges
fitted to them (equation 7).

`calibrators/kvquant.py` counts elements of each sample into a `Histogram`, then asks for levels and ranges.
"""

import torch
from torch import Tensor

from ..quant.levels import edges_of

BINS = 1024
MOST_POINTS = 4 * BINS
"""k-means gets at most so many points."""
FITTING_ROUNDS = 3


class Histogram:
    """Weighted elements, counted into narrow bins. k-means and fits use the mean of each bin in their place.

    k-means on a few thousand weighted points takes milliseconds, on millions of elements minutes. Elements
    that are spread evenly over a bin add (2 / BINS)^2 / 12 = 3e-7 to the mean squared error.

    Args:
        rows: the number of histograms: one for each channel if ranges are fitted to them, otherwise 1.

    ``weight`` and ``moment`` are sums by bin of the weights and of weight times element: fp64
    ``[rows, BINS]`` on the CPU.
    """

    def __init__(self, rows: int = 1) -> None:
        self.weight = torch.zeros(rows, BINS, dtype=torch.float64, device="cpu")
        self.moment = torch.zeros(rows, BINS, dtype=torch.float64, device="cpu")

    def see(self, x: Tensor, weight: Tensor) -> None:
        """Add elements ``[M, rows]`` with weights of the same shape; a weight of 0 leaves an element out.

        Those outside [-1, 1] count to the bins at the ends. NaN is not allowed.
        """
        rows = len(self.weight)
        x, weight = x.cpu().double(), weight.cpu().double()
        place = ((x + 1) * (BINS / 2)).long().clamp_(0, BINS - 1) + BINS * torch.arange(rows, device="cpu")
        for total, part in ((self.weight, weight), (self.moment, weight * x)):
            total += torch.bincount(place.flatten(), part.flatten(), rows * BINS).view(rows, BINS)

    def points(self) -> Tensor:
        """The mean of every bin, ``[rows, BINS]``, 0 for empty ones."""
        return torch.where(self.weight > 0, self.moment / self.weight, 0)


def best_levels(points: Tensor, weight: Tensor, bits: int) -> Tensor:
    """The ``2**bits`` levels of least weighted squared error to ``points``, sorted, fp32.
    Of fewer points each is a level, and the other levels are spread evenly over [-1, 1].

    Args:
        points, weight: of any number of histograms, fp64 of one shape on the CPU.
    """
    # scikit-learn comes with the extra `calibrate`.
    from sklearn.cluster import KMeans

    points, weight = points[weight > 0], weight[weight > 0]
    distinct = points.unique()
    if (missing := 2**bits - len(distinct)) > 0:
        spread = torch.linspace(-1, 1, missing, dtype=points.dtype, device="cpu")
        return torch.cat([distinct, spread]).sort().values.float()
    if len(points) > MOST_POINTS:  # the bins of many channels: count them into one histogram
        widest = points.abs().max().clamp_min(torch.finfo(points.dtype).tiny)
        together = Histogram()
        together.see((points / widest)[:, None], weight[:, None])
        points, weight = together.points()[0] * widest, together.weight[0]
        points, weight = points[weight > 0], weight[weight > 0]
    found = KMeans(2**bits, n_init=10, tol=1e-7, random_state=0).fit(
        points.numpy()[:, None], sample_weight=(weight / weight.mean()).numpy()
    )
    return torch.from_numpy(found.cluster_centers_[:, 0]).sort().values.float()


def fit_ranges(points: Tensor, weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """A range for each row: the stretch and the shift that bring the levels nearest to its points, two fp64
    ``[rows]``.

    It minimizes the weighted squared error of ``points ~ stretch * level + shift``: ``FITTING_ROUNDS`` times
    it takes the nearest levels, then fits both numbers. A round that does not determine them (all points at
    one level, or a stretch that would not be positive) leaves them as they are; they begin as 1 and 0.

    Args:
        points, weight: fp64 ``[rows, BINS]`` of a `Histogram`.
        levels: sorted, as `best_levels` gives them.
    """
    levels = levels.double()
    stretch = torch.ones(len(points), 1, dtype=torch.float64, device="cpu")
    shift = torch.zeros_like(stretch)
    total = weight.sum(1, keepdim=True).clamp_min(1e-300)
    for _ in range(FITTING_ROUNDS):
        level = levels[torch.bucketize((points - shift) / stretch, edges_of(levels))]
        level_mean = (weight * level).sum(1, keepdim=True) / total
        mean = (weight * points).sum(1, keepdim=True) / total
        spread = (weight * (level - level_mean) ** 2).sum(1, keepdim=True) / total
        common = (weight * (level - level_mean) * (points - mean)).sum(1, keepdim=True) / total
        known = (spread > 1e-9) & (common > 0)
        stretch = torch.where(known, common / spread.clamp_min(1e-9), stretch)
        shift = torch.where(known, mean - stretch * level_mean, shift)
    return stretch[:, 0], shift[:, 0]

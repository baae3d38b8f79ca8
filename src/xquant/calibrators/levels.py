"""Levels of a non-uniform datatype by weighted k-means, and ranges fitted to them (KVQuant,
arXiv 2401.18079, equations 1 and 7)."""

import torch
from torch import Tensor

BINS = 1024
FITTING_ROUNDS = 3


class Histogram:
    """Weighted elements in narrow bins, of which k-means and fits use the means.

    k-means on a few thousand weighted points takes milliseconds, on millions of elements minutes. The squared
    error of an element grows by less than (2 / BINS)^2 / 12, which is 3e-7 for a range of half width 1.

    Args:
        rows: histograms side by side: one for each channel where ranges are fitted, otherwise one.
    """

    def __init__(self, rows: int = 1) -> None:
        self.weight = torch.zeros(rows, BINS, dtype=torch.float64)
        self.moment = torch.zeros(rows, BINS, dtype=torch.float64)

    def see(self, x: Tensor, weight: Tensor) -> None:
        """Add elements ``[M, rows]``, most of them in [-1, 1], with their weights (0 for none)."""
        rows = len(self.weight)
        x, weight = x.cpu().double(), weight.cpu().double()
        place = ((x + 1) * (BINS / 2)).long().clamp_(0, BINS - 1) + BINS * torch.arange(rows)
        for total, part in ((self.weight, weight), (self.moment, weight * x)):
            total += torch.bincount(place.flatten(), part.flatten(), rows * BINS).view(rows, BINS)

    def points(self) -> Tensor:
        """The mean of every bin, ``[rows, BINS]``, 0 for empty ones."""
        return torch.where(self.weight > 0, self.moment / self.weight, 0)


def best_levels(points: Tensor, weight: Tensor, bits: int) -> Tensor:
    """The ``2**bits`` levels of least weighted squared error to ``points``, sorted, fp32.

    Raises:
        ValueError: fewer different points than levels.
    """
    from sklearn.cluster import KMeans

    points, weight = points[weight > 0], weight[weight > 0]
    if len(points) < 2**bits:
        raise ValueError("the calibration text is too short for a codebook: give more windows")
    if len(points) > 4 * BINS:  # of many channels: put their bins into one histogram
        widest = points.abs().max()
        together = Histogram()
        together.see((points / widest)[:, None], weight[:, None])
        points, weight = together.points()[0] * widest, together.weight[0]
        points, weight = points[weight > 0], weight[weight > 0]
    found = KMeans(2**bits, n_init=10, tol=1e-7, random_state=0).fit(
        points.numpy()[:, None], sample_weight=(weight / weight.mean()).numpy()
    )
    return torch.from_numpy(found.cluster_centers_[:, 0]).sort().values.float()


def fit_ranges(points: Tensor, weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Stretch and shift ``[rows]`` of the levels that bring them nearest to each row's points.

    Minimizes the weighted squared error of ``points ~ stretch * level + shift``: takes the nearest levels,
    then fits both numbers, ``FITTING_ROUNDS`` times. Rows whose points do not determine them keep 1 and 0.
    """
    levels = levels.double()
    stretch = torch.ones(len(points), 1, dtype=torch.float64)
    shift = torch.zeros_like(stretch)
    total = weight.sum(1, keepdim=True).clamp_min(1e-300)
    for _ in range(FITTING_ROUNDS):
        middles = (levels[1:] + levels[:-1]) / 2
        level = levels[torch.bucketize((points - shift) / stretch, middles)]
        level_mean = (weight * level).sum(1, keepdim=True) / total
        mean = (weight * points).sum(1, keepdim=True) / total
        spread = (weight * (level - level_mean) ** 2).sum(1, keepdim=True) / total
        common = (weight * (level - level_mean) * (points - mean)).sum(1, keepdim=True) / total
        known = (spread > 1e-9) & (common > 0)
        stretch = torch.where(known, common / spread.clamp_min(1e-9), stretch)
        shift = torch.where(known, mean - stretch * level_mean, shift)
    return stretch[:, 0], shift[:, 0]

"""Levels of a non-uniform datatype by weighted k-means (KVQuant, arXiv 2401.18079, equations 1 and 7)."""

import torch
from torch import Tensor

BINS = 4096


class Histogram:
    """Weighted elements of [-1, 1] in bins so narrow that k-means may work on their means.

    k-means on ``BINS`` weighted points takes milliseconds where millions of elements take minutes; the
    squared error that is lost is below (2 / BINS)^2 / 12 an element, 2e-8.
    """

    def __init__(self) -> None:
        self.weight = torch.zeros(BINS, dtype=torch.float64)
        self.moment = torch.zeros(BINS, dtype=torch.float64)

    def see(self, x: Tensor, weight: Tensor) -> None:
        """Add elements with their weights, both of any one shape."""
        x, weight = x.flatten().cpu().double(), weight.flatten().cpu().double()
        place = ((x + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
        self.weight += torch.bincount(place, weight, BINS)
        self.moment += torch.bincount(place, weight * x, BINS)

    def levels(self, bits: int) -> Tensor:
        """The ``2**bits`` levels of least weighted squared error, sorted, fp32.

        Raises:
            ValueError: fewer different elements than levels.
        """
        from sklearn.cluster import KMeans

        filled = self.weight > 0
        weight = self.weight[filled]
        points = self.moment[filled] / weight
        if len(points) < 2**bits:
            raise ValueError("the calibration text is too short for a codebook: give more windows")
        found = KMeans(2**bits, n_init=10, tol=1e-7, random_state=0).fit(
            points.numpy()[:, None], sample_weight=(weight / weight.mean()).numpy()
        )
        return torch.from_numpy(found.cluster_centers_[:, 0]).sort().values.float()

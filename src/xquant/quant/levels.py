"""Levels: the numbers that codes stand for, those of least squared error for numbers of a known density."""

import math
from functools import cache

import torch
from torch import Tensor

Mixture = tuple[tuple[float, float], ...]
"""A density: shares of normal numbers with mean 0, and the deviation of each."""

NORMAL: Mixture = ((1.0, 1.0),)
TAILED: Mixture = ((0.98, 1.0), (0.02, 2.0))
"""Normal numbers of which some are far out. Channels with many bits are like that: a few tokens, on which
much attention rests, lie 5 to 8 deviations out in them."""
TAILED_FROM = 4
"""Bits of the narrowest code with levels for them. With fewer, what the other numbers lose weighs more."""


def normal_levels(bits: int) -> Tensor:
    """The ``2**bits`` levels for a standard normal number (Lloyd and Max), fp32."""
    return _levels(bits, NORMAL)


def ranked_levels(bits: int) -> Tensor:
    """The ``2**bits`` levels of a ranked code, fp32: `normal_levels` for fewer than `TAILED_FROM` bits, those
    of `TAILED` numbers for more."""
    return _levels(bits, NORMAL if bits < TAILED_FROM else TAILED)


@cache
def _levels(bits: int, mixture: Mixture) -> Tensor:
    """A level is the mean of the numbers that are nearest to it; found by turns, from levels that lie as
    densely as the cube root of the density."""
    count = 2**bits
    x = torch.linspace(-20, 20, 100_001, dtype=torch.float64, device="cpu")
    below = _density(x, mixture).pow(1 / 3).cumsum(0)
    middles = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    levels = x[torch.searchsorted(below, middles * below[-1])]
    for _ in range(40 * count):
        edges = borders(levels)
        share = sum(w * torch.special.ndtr(edges / size) for w, size in mixture)
        # The mean of a normal number between two edges is the fall of its density from one to the other.
        fall = sum(w * size * _normal(edges / size) for w, size in mixture)
        assert isinstance(share, Tensor) and isinstance(fall, Tensor)
        moved = -fall.diff() / share.diff()
        if (moved - levels).abs().max() < 1e-6:
            break
        levels = moved
    return ((levels - levels.flip(0)) / 2).float()


def _density(x: Tensor, mixture: Mixture) -> Tensor:
    parts = [w / size * _normal(x / size) for w, size in mixture]
    return torch.stack(parts).sum(0)


def _normal(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


@cache
def distortion(bits: int) -> float:
    """The mean squared error of `normal_levels`, 1 for no bits."""
    if bits == 0:
        return 1.0
    levels = normal_levels(bits).double()
    # Levels are means: the error is what their own variance lacks of 1.
    return 1 - float((torch.special.ndtr(borders(levels)).diff() * levels.square()).sum())


def edges_of(levels: Tensor) -> Tensor:
    """What lies in the middle of neighbouring levels."""
    return (levels[1:] + levels[:-1]) / 2


def borders(levels: Tensor) -> Tensor:
    """Where the numbers nearest to each level begin and end."""
    far = levels.new_tensor([math.inf])
    return torch.cat([-far, edges_of(levels), far])

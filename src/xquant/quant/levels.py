"""Levels: the numbers that codes stand for, those of least squared error for numbers of a known density."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Mixture = tuple[tuple[float, float], ...]
"""A density: shares of normal numbers with mean 0, and the deviation of each."""

NORMAL: Mixture = ((1.0, 1.0),)
TAILED: Mixture = ((0.98, 1.0), (0.02, 2.0))
"""Normal numbers of which some are far out. Channels with many bits are like that: in a few tokens, on which
much attention rests, they are many deviations from 0 (docs/log.md, "The floor of tc")."""


def normal_levels(bits: int) -> Tensor:
    """The ``2**bits`` levels for a standard normal number (Lloyd and Max), fp32."""
    return best_levels(bits, NORMAL)


@cache
def best_levels(bits: int, mixture: Mixture) -> Tensor:
    """The ``2**bits`` levels of least squared error for numbers of a density, fp32, rising.

    A level is the mean of the numbers that are nearest to it; found by turns, from levels that lie as densely
    as the cube root of the density.
    """
    count = 2**bits
    x = torch.linspace(-20, 20, 100_001, dtype=torch.float64, device="cpu")
    below = _mixed(lambda x, size: _density(x / size) / size, x, mixture).pow(1 / 3).cumsum(0)
    middles = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    levels = x[torch.searchsorted(below, middles * below[-1])]
    for _ in range(40 * count):
        edges = borders(levels)
        share = _mixed(lambda x, size: torch.special.ndtr(x / size), edges, mixture)
        # The mean of a normal number between two edges is the fall of its density from one to the other.
        fall = _mixed(lambda x, size: size * _density(x / size), edges, mixture)
        moved = -fall.diff() / share.diff()
        if (moved - levels).abs().max() < 1e-6:
            break
        levels = moved
    return ((levels - levels.flip(0)) / 2).float()


def _mixed(of_size: Callable[[Tensor, float], Tensor], x: Tensor, mixture: Mixture) -> Tensor:
    return torch.stack([share * of_size(x, size) for share, size in mixture]).sum(0)


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def normal_error(levels: Tensor) -> float:
    """The mean squared error of rising levels for standard normal numbers."""
    levels = levels.double()
    edges = borders(levels)
    share, fall = torch.special.ndtr(edges).diff(), _density(edges).diff()
    return 1 + float((levels.square() * share + 2 * levels * fall).sum())


def edges_of(levels: Tensor) -> Tensor:
    """What lies in the middle of neighbouring levels."""
    return (levels[1:] + levels[:-1]) / 2


def borders(levels: Tensor) -> Tensor:
    """Where the numbers nearest to each level begin and end."""
    far = levels.new_tensor([math.inf])
    return torch.cat([-far, edges_of(levels), far])

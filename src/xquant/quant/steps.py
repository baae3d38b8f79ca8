"""Numbers that are powers of ``2 ** (1 / STEPS)``, and their logarithms, in steps."""

from functools import cache

import torch
from torch import Tensor

STEPS = 3
"""Steps to an octave."""
FARTHEST_STEP = 200
"""How far from 0 `steps_of` goes."""
_BORDERS = torch.tensor(
    [2 ** ((i + 0.5) * 2 / STEPS) for i in range(-FARTHEST_STEP, FARTHEST_STEP)],
    dtype=torch.float64,
    device="cpu",
)


def steps_of(variance: Tensor) -> Tensor:
    """The logarithm of the root of variances, in whole steps. From a table, as `size_of`."""
    borders = _BORDERS.to(variance.device, variance.dtype)
    return torch.bucketize(variance, borders, out_int32=True) - FARTHEST_STEP


@cache
def border_table() -> tuple[Tensor, int]:
    """The variances between those of whole steps (fp32), and the steps below the first."""
    return _BORDERS.float(), -FARTHEST_STEP


_FARTHEST = 400
_SIZES = torch.tensor(
    [2 ** (k / STEPS) for k in range(-_FARTHEST, _FARTHEST + 1)], dtype=torch.float32, device="cpu"
)


def size_table() -> tuple[Tensor, int]:
    """The numbers whose logarithms are whole steps (fp32), and where the one of 0 is."""
    return _SIZES, _FARTHEST


def size_of(steps: Tensor) -> Tensor:
    """The number of which ``steps`` is the logarithm. From a table: a function may round differently on
    another device, or for another number of elements."""
    return _SIZES.to(steps.device)[steps.clamp(-_FARTHEST, _FARTHEST) + _FARTHEST]

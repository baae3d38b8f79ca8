"""Non-uniform codes: a table of levels in [-1, 1], rescaled by an fp16 scale and zero per vector, with
the outliers of each vector kept apart (KVQuant, arXiv 2401.18079, sections 3.3 and 3.4).

``x ~ level[code] * scale + zero``, with ``zero`` the middle and ``scale`` half the width of the range
of what is not an outlier. Edges are as in `affine`.
"""

import torch
from torch import Tensor

from .affine import FP16_MAX, divisor, group_range
from .levels import edges_of

Bounds = tuple[Tensor, Tensor]


def uniform_levels(bits: int) -> Tensor:
    """``2**bits`` levels at equal distances from -1 to 1 (the papers' intX)."""
    return torch.linspace(-1, 1, 2**bits, dtype=torch.float32, device="cpu")


def normal_float_levels(bits: int) -> Tensor:
    """NormalFloat levels (QLoRA, arXiv 2305.14314, section 3), for 2 to 8 bits.

    Quantiles of the normal distribution at equal distances, ``2**(bits-1) - 1`` below zero, zero, and
    ``2**(bits-1)`` above, divided by the largest.
    """
    half = 2 ** (bits - 1)
    edge = 1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(edge, 0.5, n, dtype=torch.float64, device="cpu"))
        for n in (half + 1, half)
    )
    levels = torch.cat([above, -below[:-1]])
    return (levels / levels.abs().max()).sort().values.float()


FEW = 32
"""Levels up to which a CPU compares with edge after edge sooner than it looks up their place."""


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Codes (uint8) of the levels (sorted, ``[2**b]``) nearest to ``x``; a tie takes the lower."""
    edges = edges_of(levels)
    if x.device.type != "cpu" or len(levels) > FEW:
        return torch.bucketize(x, edges).to(torch.uint8)
    codes = torch.zeros_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format)
    for edge in edges.tolist():
        codes += x > edge
    return codes


def outlier_count(share: float, length: int) -> int:
    """Outliers of a vector of ``length``: the nearest to ``share``, but one at least (unless it is 0), and
    never all."""
    return 0 if share == 0 else min(max(1, round(share * length)), length - 1)


def inner_range(part: Tensor, dim: int, count: int, hidden: Tensor | None = None) -> Bounds:
    """The range along ``dim`` that leaves at most ``count`` elements of a vector outside, half of them at
    each end, an odd one where the range becomes narrower.

    Args:
        part: ``[..., T, C]`` fp32.
        dim: the vector's dimension; kept as size 1.
        count: below ``part.shape[dim]``.
        hidden: elements that do not count.

    Returns:
        lowest and highest inside; where nothing is inside the lowest is above the highest.
    """
    low, high = part, part
    if hidden is not None:
        low, high = part.masked_fill(hidden, torch.inf), part.masked_fill(hidden, -torch.inf)
    most = count - count // 2
    low = low.topk(most + 1, dim, largest=False).values
    high = high.topk(most + 1, dim).values
    return cut_ends(low, high, dim, count)


def cut_ends(smallest: Tensor, largest: Tensor, dim: int, count: int) -> Bounds:
    """`inner_range` from a vector's smallest elements (ascending) and largest (descending)."""
    fewer, more = count // 2, count - count // 2
    one = smallest.narrow(dim, fewer, 1), largest.narrow(dim, more, 1)
    if fewer == more:
        return one
    other = smallest.narrow(dim, more, 1), largest.narrow(dim, fewer, 1)
    narrower = one[1] - one[0] <= other[1] - other[0]
    low, high = (torch.where(narrower, a, b) for a, b in zip(one, other, strict=True))
    return low, high


def scale_of(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 scale and zero that map the range to [-1, 1]; a range that holds nothing gives 0 and 0."""
    empty = low > high
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    zero = ((low + high) / 2).clamp(-FP16_MAX, FP16_MAX).half()
    reach = torch.maximum(high - zero.float(), zero.float() - low)
    return reach.clamp(0, FP16_MAX).half(), zero


def normalize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``(x - zero) / scale`` in fp32, 0 where the scale is 0."""
    return (x - zero.float()) / divisor(scale)


def outside(x: Tensor, threshold: Bounds, hidden: Tensor | None) -> Tensor:
    """Which elements of ``x`` lie outside; those ``hidden`` do not."""
    found = (x < threshold[0]) | (x > threshold[1])
    return found if hidden is None else found & ~hidden


def ranges(
    x: Tensor,
    dim: int,
    group: int,
    hidden: Tensor | None,
    share: float = 0.0,
    threshold: Bounds | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scale and zero of every group of ``x`` ``[..., T, C]``, and which elements are outliers.

    Args:
        hidden: elements ``[..., T, C]`` that do not count and are no outliers.
        share: of a vector's elements that are outliers, found here (`inner_range`).
        threshold: elements outside are outliers; broadcasts with ``x``. Replaces ``share``.
    """
    outliers = None
    if threshold is not None:
        outliers = outside(x, threshold, hidden)
    elif share:
        outliers = torch.zeros_like(x, dtype=torch.bool)
    scales, zeros = [], []
    for start in range(0, x.shape[dim], group):
        length = min(group, x.shape[dim] - start)
        part = x.narrow(dim, start, length)
        apart = None if hidden is None else hidden.narrow(dim, start, length)
        if outliers is not None and threshold is None:
            low, high = inner_range(part, dim, outlier_count(share, length), apart)
            found = (part < low) | (part > high)
            outliers.narrow(dim, start, length).copy_(found if apart is None else found & ~apart)
        else:
            if outliers is not None:
                found = outliers.narrow(dim, start, length)
                apart = found if apart is None else found | apart
            low, high = group_range(part, dim, apart)
        scale, zero = scale_of(low, high)
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(scales, dim), torch.cat(zeros, dim), outliers

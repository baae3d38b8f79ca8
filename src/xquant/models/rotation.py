"""How a rotary embedding rotates a head: pairs of channels, and the order in which they are pairs of halves.

Families differ in which channels of a head form a pair (channel ``i`` with ``i + R / 2``, or neighbours), in
which direction pairs are rotated, and in which part of a head. After a permutation of the head's channels all
are the same: channel ``i`` is rotated with ``i + R / 2``, forwards, and channels past ``R`` stay. The cache
holds keys in that order, and queries are brought into it before they meet keys, which changes no score. So
kernels and methods know one rotation, `apply_rope`.

Letters: ``R`` channels that are rotated, of the ``D`` of a head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[B, T, G, D]`` by ``cos``, ``sin`` ``[B, T, R]``, ``R <= D``.

    Channel ``i`` is rotated with channel ``i + R / 2``. Channels past ``R`` (partial rotary embeddings) pass
    unchanged.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    width = cos.shape[-1]
    rotated, passed = x[..., :width], x[..., width:]
    sin1, sin2 = sin.chunk(2, -1)
    # On whole heads and in place. Working on each half, with new memory for each product, is several times
    # slower.
    partners = rotated.roll(width // 2, -1).mul_(torch.cat([-sin1, sin2], -1))
    rotated = (rotated * cos).add_(partners)
    return torch.cat((rotated, passed), -1) if passed.shape[-1] else rotated


def remove_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `apply_rope`, also where ``cos`` and ``sin`` carry a scale (YaRN). Computed in fp32 at
    least, returned in the dtype of ``x``."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rope(x.to(dtype), *inverse(cos.to(dtype), sin.to(dtype))).to(x.dtype)


def inverse(cos: Tensor, sin: Tensor) -> Pair:
    """cos and sin ``[..., R]`` of the inverse rotation, as `apply_rope` takes them."""
    (cos1, cos2), (sin1, sin2) = (t.chunk(2, -1) for t in (cos, sin))
    determinant = (cos1 * cos2 + sin1 * sin2).repeat(*[1] * (cos.ndim - 1), 2)
    return torch.cat([cos2, cos1], -1) / determinant, torch.cat([-sin1, -sin2], -1) / determinant


def orders(size: int, rotated: int) -> Iterator[Tensor]:
    """The orders in which families may have the channels of heads of ``size``, of which some are ``rotated``.

    Each, int64 ``[D]``, says which of a model's channels stand where `apply_rope` wants them. The first
    changes nothing. A rotation backwards is one forwards of pairs whose two channels are exchanged.
    """
    channels = torch.arange(size, device="cpu")
    for start in dict.fromkeys((0, size - rotated)):
        part = channels[start : start + rotated]
        passed = torch.cat([channels[:start], channels[start + rotated :]])
        for halves in (part, part.view(-1, 2).T.flatten()):
            for pairs in (halves, halves.roll(rotated // 2)):
                yield torch.cat([pairs, passed])


def widened(order: Tensor, rotated: int) -> Tensor:
    """The order ``[D]`` of the channels of a head, of which RoPE rotates only the first ``rotated``, for
    kernels that rotate whole heads: the other channels become pairs, too, which `widen` rotates by 0."""
    pairs, passed = order[:rotated].chunk(2), order[rotated:].chunk(2)
    return torch.cat([pairs[0], passed[0], pairs[1], passed[1]])


def widen(pair: Pair, size: int) -> Pair:
    """cos and sin ``[..., R]`` as those of heads of ``size`` whose other pairs are rotated by 0."""
    cos, sin = pair
    more = (size - cos.shape[-1]) // 2
    if not more:
        return pair
    halves = zip(cos.chunk(2, -1), sin.chunk(2, -1), strict=True)
    one, zero = cos.new_ones(()), sin.new_zeros(())
    rest = one.expand(*cos.shape[:-1], more), zero.expand(*sin.shape[:-1], more)
    parts = [part for first, second in halves for part in ((first, second), rest)]
    coses, sines = zip(*parts, strict=True)
    return torch.cat(coses, -1), torch.cat(sines, -1)


HALVES, NEIGHBOURS, ONCE, COMPLEX = "halves", "neighbours", "once", "complex"
"""How a table of cos or sin holds the angles of ``R / 2`` pairs of channels. `HALVES`: all angles, and then
all again. `NEIGHBOURS`: each angle twice, side by side. `ONCE`: each once. `COMPLEX`: each once, as a complex
number."""


def form_of(table: Any) -> str:
    """In which of the forms a rotary embedding gives its table.

    Args:
        table: of positions other than 0, two ``[B, T, .]`` or a complex one.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(table, Tensor) and table.is_complex():
        return COMPLEX
    if not isinstance(table, tuple) or len(table) != 2:
        raise TypeError(f"a rotary embedding that gives a {type(table).__name__}")
    sin: Tensor = table[1]
    if sin.device.type == "meta" or torch.equal(*sin.chunk(2, -1)):
        return HALVES
    return NEIGHBOURS if torch.equal(sin[..., ::2], sin[..., 1::2]) else ONCE


def as_halves(table: Any, form: str) -> Pair:
    """cos and sin ``[B, T, R]`` as `apply_rope` takes them, of a table of a model's rotary embedding."""
    if form == HALVES:
        return table[0], table[1]
    pair = (table.real, table.imag) if form == COMPLEX else table
    if form == NEIGHBOURS:
        pair = tuple(t[..., ::2] for t in pair)
    cos, sin = (torch.cat([t, t], -1) for t in pair)
    return cos, sin

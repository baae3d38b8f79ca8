"""Packed blocks to states, inside a Triton kernel: codes (`codes`) with their scales, zeros and outliers.

A state is ``code * scale + zero``, with ``codebook[code]`` in place of the code where there is one, plus the
residual of an outlier. The kernels hold a QUARTER of it in fp16, ``level * scale + zero / 4``.
"""

import triton
import triton.language as tl

from .codes import QUARTER, pointer
from .halves import as_words, constant, halves_of, higher, lower, multiply, multiply_add

# How far a range reaches within a head of a block: see `operand.Layout`.
TILE = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
TOKEN = tl.constexpr(2)


# -- scales and zeros ------------------------------------------------------------------------------


@triton.jit
def _along(field_words, place):
    """Scales or zeros along the summed axis, words ``[K / 2]`` in the order of codes.

    ``place`` ``[K / 2]``: where those in even places lie, -1 where there is none; those in odd places are
    their neighbours. They are loaded by words, because what is narrower is not loaded ahead.
    """
    HALF: tl.constexpr = place.shape[0]
    loaded = tl.load(field_words + place // 2, place >= 0, 0)
    first, second = tl.split(tl.reshape(loaded, (HALF // 2, 2)))
    both = tl.join(lower(first, second), higher(first, second))
    return tl.reshape(tl.trans(both), (HALF,))


@triton.jit
def _across(field_words, place):
    """Scales or zeros of lanes, words ``[M]`` with one of them in both halves; ``place`` ``[M]``: where they
    lie, -1 where there is none."""
    loaded = tl.load(field_words + place // 2, place >= 0, 0)
    return tl.where(place % 2 == 0, lower(loaded, loaded), higher(loaded, loaded))


@triton.jit
def token_ranges(block, token, first, N: tl.constexpr, LAYOUT: tl.constexpr):
    """Scale and zero of each ``token`` of a head whose first channel is ``first``, fp32; of ranges over all
    channels of a token."""
    place = tl.where(token >= 0, first // LAYOUT.group * N + token, -1)
    scale = halves_of(_across(pointer(block.scale, tl.int32), place))[0]
    zero = halves_of(_across(pointer(block.zero, tl.int32), place))[0]
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def scale_and_base(
    block, token, channel, first,
    N: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr,
    C,
    LAYOUT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """``scale`` and ``base`` by words, both broadcast to ``[DP, NP / 2]`` or, with ``TOKENS_FIRST``,
    ``[NP, DP / 2]``.

    ``token`` ``[NP]`` and ``channel`` ``[DP]``: those of the tile, even ones first, -1 where there is none;
    ``first``: the channel of the token that the head begins with.
    """
    SPAN: tl.constexpr = LAYOUT.span
    if SPAN == TILE:
        scales, zeros = pointer(block.scale, tl.float16), pointer(block.zero, tl.float16)
        if TOKENS_FIRST:
            t, c = token[:, None], channel[None, :]
        else:
            t, c = token[None, :], channel[:, None]
        if LAYOUT.per_token:
            place = (first + c) // LAYOUT.group * N + t
        else:
            place = t // LAYOUT.group * C + first + c
        there = (t >= 0) & (c >= 0)
        M: tl.constexpr = place.shape[0]
        K: tl.constexpr = place.shape[1]
        scale = as_words(tl.load(scales + place, there, 0), M, K)
        zero = as_words(tl.load(zeros + place, there, 0), M, K)
    else:
        scales, zeros = pointer(block.scale, tl.int32), pointer(block.zero, tl.int32)
        own, start = channel, first
        if SPAN == TOKEN:
            own, start = token, first // LAYOUT.group * N
        if (SPAN == CHANNEL) == TOKENS_FIRST:
            even = tl.min(tl.reshape(own, (2, own.shape[0] // 2)), 0)
            place = tl.where(even >= 0, start + even, -1)
            scale, zero = _along(scales, place)[None, :], _along(zeros, place)[None, :]
        else:
            place = tl.where(own >= 0, start + own, -1)
            scale, zero = _across(scales, place)[:, None], _across(zeros, place)[:, None]
    return scale, multiply(zero, constant(QUARTER))


@triton.jit
def decode(
    block, level, token, channel, first,
    D: tl.constexpr, N: tl.constexpr,
    C,
    LAYOUT: tl.constexpr, TOKENS_FIRST: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """A quarter of the states of a head of a block, ``level * scale + base`` and residuals, by words: shape
    ``[DP, NP / 2]`` or, with ``TOKENS_FIRST``, ``[NP, DP / 2]``; ``level`` as of `levels_of`.

    It computes in halves, two in a register: most of the time of a product goes into this.
    """
    scale, base = scale_and_base(block, token, channel, first, N, NP, DP, C, LAYOUT, TOKENS_FIRST)
    return multiply_add(level, scale, base)

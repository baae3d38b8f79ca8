"""Products of queries, and of weights, with one head of a packed block, inside a Triton kernel.

Operands are fp16, sums fp32. What is rounded to fp16 is divided by its largest first, so that no query and no
range leaves it; codes and levels are exact.
"""

import triton
import triton.language as tl

from .unpack import CHANNEL, TILE, codes, decoded, field, numbers, ranges

SMALL = tl.constexpr(0.25)  # a rotation of the largest state that is stored stays within fp16
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def over(x):
    """1 / x, 0 for 0."""
    return tl.where(x > 0, 1 / tl.where(x > 0, x, 1), 0)


@triton.jit
def to_halves(x):
    """``[R, K]`` in fp16, and what each row is to be multiplied with ``[R, 1]``."""
    unit = tl.max(tl.abs(x), 1)[:, None]
    return (x * over(unit)).to(tl.float16), unit


@triton.jit
def small(states):
    """Decoded states in fp16, as SMALL of them."""
    return tl.minimum(tl.maximum(states * SMALL, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit
def split(x):
    """fp16, and what that leaves, in fp16 too."""
    x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def turned(x, cos, sin, A: tl.constexpr, B: tl.constexpr):
    """``[A, B]`` with its halves turned by angles ``[A / 2, B]``."""
    low, high = tl.split(tl.permute(tl.reshape(x, (2, A // 2, B)), (1, 2, 0)))
    both = tl.join(low * cos - high * sin, high * cos + low * sin)
    return tl.reshape(tl.permute(both, (2, 0, 1)), (A, B))


@triton.jit
def block_scores(
    blocks,
    each,
    at,
    levels,
    offset,
    query,
    token,
    channel,
    turn_cos,
    turn_sin,
    head,
    kv_heads,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    SPARSE: tl.constexpr,
    OFFSET: tl.constexpr,
    TURN: tl.constexpr,
):
    """Scores fp32 ``[R, NP]`` of ``query`` fp32 ``[R, DP]``; ``at``: which block of the table."""
    words = field(blocks, 0, each, at, tl.int32) + head * (D * N * BITS // 32)
    found = numbers(codes(words, token, D, DP, BITS, NP), levels, BITS, TABLE)
    first, width = head * D, kv_heads * D
    if SPAN == TILE or SPARSE or TURN:
        keys = decoded(
            blocks, each, at, found, token, channel, first, D, N, width,
            BITS, TABLE, PER_TOKEN, SPAN, GROUP, SPARSE, False, NP, DP,
        )  # fmt: skip
        if OFFSET:
            keys += tl.load(offset + first + channel, channel >= 0, 0)[:, None]
        if TURN:
            keys = turned(keys, turn_cos, turn_sin, DP, NP)
        left, unit = to_halves(query)
        return tl.dot(left, small(keys)) * (unit / SMALL)
    else:
        step, base = ranges(
            blocks, each, at, token, channel, first, N, NP, DP, width,
            BITS, TABLE, PER_TOKEN, SPAN, GROUP, False,
        )  # fmt: skip
        if SPAN == CHANNEL:
            left, unit = to_halves(query * step[None, :])
            return tl.dot(left, found) * unit + tl.sum(query * base[None, :], 1)[:, None]
        else:
            left, unit = to_halves(query)
            return (
                tl.dot(left, found) * unit * step[None, :]
                + tl.sum(query, 1)[:, None] * base[None, :]
            )


@triton.jit
def block_sums(
    blocks,
    each,
    at,
    levels,
    weights,
    token,
    channel,
    head,
    kv_heads,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Values summed by ``weights`` fp32 ``[R, NP]`` of at most 1: fp32 ``[R, DP]``."""
    words = field(blocks, 0, each, at, tl.int32) + head * (D * N * BITS // 32)
    found = numbers(codes(words, channel, N, NP, BITS, DP), levels, BITS, TABLE)
    first, width = head * D, kv_heads * D
    if SPAN == TILE or SPARSE:
        values = decoded(
            blocks, each, at, found, token, channel, first, D, N, width,
            BITS, TABLE, PER_TOKEN, SPAN, GROUP, SPARSE, True, NP, DP,
        )  # fmt: skip
        return tl.dot(weights.to(tl.float16), small(values)) / SMALL
    else:
        step, base = ranges(
            blocks, each, at, token, channel, first, N, NP, DP, width,
            BITS, TABLE, PER_TOKEN, SPAN, GROUP, True,
        )  # fmt: skip
        if SPAN == CHANNEL:
            sums = tl.dot(weights.to(tl.float16), found) * step[None, :]
            return sums + tl.sum(weights, 1)[:, None] * base[None, :]
        else:
            unit = tl.max(step, 0)
            left = weights * (step * over(unit))[None, :]
            sums = tl.dot(left.to(tl.float16), found) * unit
            return sums + tl.sum(weights * base[None, :], 1)[:, None]

"""Products of one head of a packed block with queries, and with weights, inside a Triton kernel.

What is packed is the left side (`unpack`), queries or weights are columns on the right. Operands are fp16,
sums fp32. What is rounded to fp16 is divided by its largest first, so that no query and no range leaves it;
codes and levels are exact.
"""

import triton
import triton.language as tl

from .unpack import CHANNEL, TILE, along, decoded, field, middle, numbers, pairs, ranges

SMALL = tl.constexpr(0.25)  # a rotation of the largest state that is stored stays within fp16
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def over(x):
    """1 / x, 0 for 0."""
    return tl.where(x > 0, 1 / tl.where(x > 0, x, 1), 0)


@triton.jit
def to_halves(x):
    """``[K, R]`` in fp16, and what each column is to be multiplied with ``[1, R]``."""
    unit = tl.max(tl.abs(x), 0)[None, :]
    return (x * over(unit)).to(tl.float16), unit


@triton.jit
def small(states):
    """States in fp16, as SMALL of them, whatever they are."""
    return tl.minimum(tl.maximum(states * SMALL, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit
def split(x):
    """fp16, and what that leaves, in fp16 too."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def turned(x, cos, sin, M: tl.constexpr, K: tl.constexpr):
    """``[M, K]``, channels in the order of `unpack.coded`, with their halves turned by angles
    ``[M, K / 2]``."""
    low, high = tl.split(tl.permute(tl.reshape(x, (M, 2, 2, K // 4)), (0, 1, 3, 2)))
    cos, sin = tl.reshape(cos, (M, 2, K // 4)), tl.reshape(sin, (M, 2, K // 4))
    both = tl.join(low * cos - high * sin, high * cos + low * sin)
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (M, K))


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
    """Scores fp32 ``[NP, R]`` of ``query`` fp32 ``[DP, R]``; ``at``: which block of the table."""
    words = field(blocks, 0, each, at, tl.int32) + head * (D * N * BITS // 32)
    found = pairs(words, token, D, DP, BITS, NP)
    first, width = head * D, kv_heads * D
    if TURN and SPAN == CHANNEL and not SPARSE:
        # In halves all the way, two in a register: more of the time goes into this than into all else.
        even = tl.min(tl.reshape(channel, (2, DP // 2)), 0)
        step, base = along(blocks, each, at, tl.where(even >= 0, first + even, -1), DP)
        base += step * middle(BITS, TABLE)
        if OFFSET:
            base += tl.load(offset + first + channel, channel >= 0, 0).to(tl.float16)
        keys = numbers(found, levels, BITS, TABLE, NP, DP)
        keys = turned(keys * step[None, :] + base[None, :], turn_cos, turn_sin, NP, DP)
        unit = tl.max(tl.abs(query), 0)[None, :]
        right, rest = split(query * over(unit))
        return tl.dot(keys, right, tl.dot(keys, rest)) * (unit / SMALL)
    elif SPAN == TILE or SPARSE or TURN:
        keys = decoded(
            blocks, each, at, numbers(found, levels, BITS, TABLE, NP, DP), token, channel, first,
            D, N, width, BITS, TABLE, PER_TOKEN, SPAN, GROUP, SPARSE, True, NP, DP,
        )  # fmt: skip
        if OFFSET:
            keys += tl.load(offset + first + channel, channel >= 0, 0)[None, :]
        if TURN:
            keys = turned(keys, turn_cos.to(tl.float32), turn_sin.to(tl.float32), NP, DP)
        else:
            keys *= SMALL
        right, unit = to_halves(query)
        return tl.dot(keys.to(tl.float16), right) * (unit / SMALL)
    else:
        step, base = ranges(
            blocks, each, at, token, channel, first, N, NP, DP, width,
            BITS, TABLE, PER_TOKEN, SPAN, GROUP, True,
        )  # fmt: skip
        keys = numbers(found, levels, BITS, TABLE, NP, DP)
        if SPAN == CHANNEL:
            right, unit = to_halves(query * step[:, None])
            return tl.dot(keys, right) * unit + tl.sum(query * base[:, None], 0)[None, :]
        else:
            right, unit = to_halves(query)
            scores = tl.dot(keys, right) * unit * step[:, None]
            return scores + tl.sum(query, 0)[None, :] * base[:, None]


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
    """Values summed by ``weights`` fp32 ``[NP, R]`` of at most 1: fp32 ``[DP, R]``; and ``[NP, R]``, to be
    summed over tokens, what all channels lack."""
    words = field(blocks, 0, each, at, tl.int32) + head * (D * N * BITS // 32)
    found = pairs(words, channel, N, NP, BITS, DP)
    first, width = head * D, kv_heads * D
    if SPAN == TILE or SPARSE:
        values = decoded(
            blocks, each, at, numbers(found, levels, BITS, TABLE, DP, NP), token, channel, first,
            D, N, width, BITS, TABLE, PER_TOKEN, SPAN, GROUP, SPARSE, False, NP, DP,
        )  # fmt: skip
        sums = tl.dot((values * SMALL).to(tl.float16), weights.to(tl.float16)) / SMALL
        return sums, tl.zeros_like(weights)
    else:
        step, base = ranges(
            blocks, each, at, token, channel, first, N, NP, DP, width,
            BITS, TABLE, PER_TOKEN, SPAN, GROUP, False,
        )  # fmt: skip
        values = numbers(found, levels, BITS, TABLE, DP, NP)
        if SPAN == CHANNEL:
            sums = tl.dot(values, weights.to(tl.float16)) * step[:, None]
            sums += tl.sum(weights, 0)[None, :] * base[:, None]
            return sums, tl.zeros_like(weights)
        else:
            unit = tl.max(step, 0)
            right = (weights * (step * over(unit))[:, None]).to(tl.float16)
            return tl.dot(values, right) * unit, weights * base[:, None]

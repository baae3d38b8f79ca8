"""Products of one head of a packed block with queries, and with weights, inside a Triton kernel.

What is packed is the left side (`unpack`), queries or weights are columns on the right. Operands are fp16,
sums fp32. A query is divided by its largest first, and what rounding leaves of it is multiplied too, so that
keys and values are rounded, and nothing else that matters.
"""

import triton
import triton.language as tl

from .unpack import SMALL, decoded, field, numbers, pairs

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
    right,
    rest,
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
    """SMALL of scores, fp32 ``[NP, R]``, of queries fp16 ``[DP, R]``, as of `split`; ``at``: which block of
    the table."""
    words = field(blocks, 0, each, at, tl.int32) + head * (D * N * BITS // 32)
    found = numbers(pairs(words, token, D, DP, BITS, NP), levels, BITS, TABLE, NP, DP)
    keys = decoded(
        blocks, each, at, found, token, channel, head * D,
        D, N, kv_heads * D, BITS, TABLE, PER_TOKEN, SPAN, GROUP, SPARSE, True, NP, DP,
    )  # fmt: skip
    if OFFSET:
        mean = tl.load(offset + head * D + channel, channel >= 0, 0) * SMALL
        keys += mean.to(tl.float16)[None, :]
    if TURN:
        keys = turned(keys, turn_cos, turn_sin, NP, DP)
    return tl.dot(keys, right, tl.dot(keys, rest))


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
    """SMALL of values summed by ``weights`` fp32 ``[NP, R]`` of at most 1: fp32 ``[DP, R]``."""
    words = field(blocks, 0, each, at, tl.int32) + head * (D * N * BITS // 32)
    found = numbers(pairs(words, channel, N, NP, BITS, DP), levels, BITS, TABLE, DP, NP)
    values = decoded(
        blocks, each, at, found, token, channel, head * D,
        D, N, kv_heads * D, BITS, TABLE, PER_TOKEN, SPAN, GROUP, SPARSE, False, NP, DP,
    )  # fmt: skip
    return tl.dot(values, weights.to(tl.float16))

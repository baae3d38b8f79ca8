"""Products of one head of a packed block with queries, and with weights, inside a Triton kernel.

What is packed is the left side (`unpack`), queries or weights are columns on the right. Operands are fp16,
sums fp32. A query is divided by its largest element first, and what rounding leaves of it is multiplied
too, so that keys and values are rounded, and nothing else that matters.
"""

import triton
import triton.language as tl

from .unpack import CODES, QUARTER, decode, field, levels_of, load_codes

HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def reciprocal(x):
    """1 / x, 0 for 0."""
    return tl.where(x > 0, 1 / tl.where(x > 0, x, 1), 0)


@triton.jit
def to_halves(x):
    """``x`` ``[K, R]`` in fp16, each column divided by its largest element; and these, ``[1, R]``."""
    unit = tl.max(tl.abs(x), 0)[None, :]
    return (x * reciprocal(unit)).to(tl.float16), unit


@triton.jit
def quarter(states):
    """A QUARTER of states in fp16, which saturate."""
    return tl.minimum(tl.maximum(states * QUARTER, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit
def high_and_low(x):
    """``x`` in fp16, and what rounding leaves of it, in fp16 too."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def rotated(x, cos, sin, M: tl.constexpr, K: tl.constexpr):
    """``x`` ``[M, K]`` after RoPE by ``cos`` and ``sin`` ``[M, K / 2]``; channels ``K`` are in the order of
    `unpack.tile_order`."""
    low, high = tl.split(tl.permute(tl.reshape(x, (M, 2, 2, K // 4)), (0, 1, 3, 2)))
    cos, sin = tl.reshape(cos, (M, 2, K // 4)), tl.reshape(sin, (M, 2, K // 4))
    both = tl.join(low * cos - high * sin, high * cos + low * sin)
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (M, K))


@triton.jit
def block_scores(
    block,
    codebook,
    offset,
    high,
    low,
    token,
    channel,
    within_cos,
    within_sin,
    head,
    kv_heads,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    LAYOUT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """A quarter of the scores of a block, fp32 ``[NP, R]``: ``R(r) (k + offset) . (high + low)`` of its keys.

    Args:
        high: queries fp16 ``[DP, R]``; and ``low``, what rounding left of them: see `high_and_low`.
        within_cos: fp16 ``[NP, DP / 2]``, the rotation ``R(r)`` of each place of a block, as ``within_sin``.
        offset: fp32 ``[G D]``, the bias of keys, which their codes do without.
    """
    BITS: tl.constexpr = LAYOUT.bits
    words = field(block, CODES, tl.int32) + head * (D * N * BITS // 32)
    level = levels_of(load_codes(words, token, D, DP, BITS, NP), codebook, LAYOUT, NP, DP)
    keys = decode(block, level, token, channel, head * D, D, N, kv_heads * D, LAYOUT, True, NP, DP)
    if OFFSET:
        mean = tl.load(offset + head * D + channel, channel >= 0, 0) * QUARTER
        keys += mean.to(tl.float16)[None, :]
    if ROTATE:
        keys = rotated(keys, within_cos, within_sin, NP, DP)
    return tl.dot(keys, high, tl.dot(keys, low))


@triton.jit
def block_sums(
    block,
    codebook,
    weights,
    token,
    channel,
    head,
    kv_heads,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """A quarter of the sums of a block's values by ``weights``, fp32 ``[NP, R]``, of at most 1: fp32
    ``[DP, R]``."""
    BITS: tl.constexpr = LAYOUT.bits
    words = field(block, CODES, tl.int32) + head * (D * N * BITS // 32)
    level = levels_of(load_codes(words, channel, N, NP, BITS, DP), codebook, LAYOUT, DP, NP)
    values = decode(
        block, level, token, channel, head * D, D, N, kv_heads * D, LAYOUT, False, NP, DP
    )
    return tl.dot(values, weights.to(tl.float16))

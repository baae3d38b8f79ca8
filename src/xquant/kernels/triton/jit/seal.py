"""The kernel that seals blocks: ranges, affine codes, tiles and planes in one launch, bit for bit what
quant/affine.py and quant/pack.py make of them.

A program has a head of a block. Ranges that reach past the head are found by every head in them, and
stored by the first.
"""

import triton
import triton.language as tl

from .unpack import LANES, order, run_width

HALF_MAX = tl.constexpr(65504.0)
CHUNK = tl.constexpr(32)
TO_WHOLE = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: a sum with it has no fraction, rounded half to even


@triton.jit
def ends(
    rows,
    hidden,
    across,
    across_stride,
    along_stride,
    start,
    stop,
    A: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Lowest and highest ``[A]`` of what lies from ``start`` to ``stop``, and whether any is NaN.

    ``across`` ``[A]``: which vectors, -1 for none; ``hidden``: which places along them do not count.
    """
    low = tl.full([A], float("inf"), tl.float32)
    high = tl.full([A], float("-inf"), tl.float32)
    nothing = tl.zeros([A], tl.int32)
    for first in range(start, stop, CHUNK):
        place = first + tl.arange(0, CHUNK)
        counts = place < stop
        if HIDDEN:
            counts = counts & (tl.load(hidden + place, counts, 1) == 0)
        whole = (across >= 0)[:, None] & counts[None, :]
        at = across[:, None] * across_stride + place[None, :] * along_stride
        x = tl.load(rows + at, whole, 0).to(tl.float32)
        nothing = tl.maximum(nothing, tl.max((x != x).to(tl.int32), 1))
        x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
        low = tl.minimum(low, tl.min(tl.where(whole, x, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(whole, x, float("-inf")), 1))
    empty = low > high
    return tl.where(empty, 0, low), tl.where(empty, 0, high), tl.max(nothing, 0)


@triton.jit
def pack_plane(
    out,
    codes,
    lane,
    SUMMED: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
):
    """One plane of codes int32 ``[PADDED, M]``: the inverse of what `unpack` does with it."""
    shift: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)
    rows: tl.constexpr = SUMMED * run_width(BITS) // 32
    padded: tl.constexpr = PADDED * run_width(BITS) // 32
    count: tl.constexpr = PADDED * WIDTH // 32
    part = tl.reshape((codes >> shift) & ((1 << WIDTH) - 1), (8 // WIDTH, count, 4, M))
    run = tl.arange(0, 8 // WIDTH)[:, None, None, None] * WIDTH
    byte = tl.arange(0, 4)[None, None, :, None] * 8
    word = tl.sum(tl.sum(part << (run + byte), 2), 0).to(tl.int32)
    row = tl.arange(0, count)
    there = (row % padded < rows)[:, None] & (lane >= 0)[None, :]
    row = SUMMED * shift // 32 + row // padded * rows + row % padded
    column = lane // LANES * (SUMMED * BITS // 32 * LANES) + lane % LANES
    tl.store(out + row[:, None] * LANES + column[None, :], word, there)


@triton.jit
def seal(
    rows,
    hidden,
    codes,
    scale,
    zero,
    found_nan,
    block_stride,
    token_stride,
    C,
    zero_shift,
    scale_share,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    ETA: tl.constexpr,
):
    """Grid: blocks, heads.

    ``rows`` ``[N, n, C]``, contiguous along C; ``codes`` by int32; ``BY_TOKEN``: lanes of a tile are tokens.
    """
    block, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * D
    most: tl.constexpr = (1 << BITS) - 1
    rows += block * block_stride
    if HIDDEN:
        hidden += block * N
    token, channel = tl.arange(0, NP), tl.arange(0, DP)
    if BY_TOKEN:
        token = tl.where(token < N, token, -1)
        channel = order(channel, D, DP, BITS)
        t, c = token[None, :], channel[:, None]
    else:
        token = order(token, N, NP, BITS)
        channel = tl.where(channel < D, channel, -1)
        t, c = token[:, None], channel[None, :]
    there = (t >= 0) & (c >= 0)
    x = tl.load(rows + t * token_stride + first + c, there, 0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
    if HIDDEN:
        x = tl.where(tl.load(hidden + t, t >= 0, 1) != 0, 0, x)
    if PER_TOKEN:
        ranges, begin, end = tl.cdiv(C, GROUP), first // GROUP, (first + D - 1) // GROUP + 1
        member = (first + c) // GROUP
    else:
        ranges, begin, end = tl.cdiv(N, GROUP), 0, tl.cdiv(N, GROUP)
        member = t // GROUP
    base, divisor = tl.zeros_like(x), tl.full(x.shape, 1, tl.float32)
    for j in range(begin, end):
        if PER_TOKEN:
            stop = tl.minimum((j + 1) * GROUP, C)
            low, high, bad = ends(
                rows, hidden, token, token_stride, 1, j * GROUP, stop, NP, HIDDEN
            )  # fmt: skip
            place, stored = (block * ranges + j) * N + token, (token >= 0) & (j * GROUP >= first)
        else:
            across = tl.where(channel >= 0, first + channel, -1)
            stop = tl.minimum((j + 1) * GROUP, N)
            low, high, bad = ends(
                rows, hidden, across, 1, token_stride, j * GROUP, stop, DP, HIDDEN
            )  # fmt: skip
            place, stored = (block * ranges + j) * C + across, channel >= 0
        tl.store(found_nan, bad, bad > 0)
        bottom = low.to(tl.float16)
        height = tl.maximum(high - bottom.to(tl.float32), 0)
        step = tl.minimum(tl.math.div_rn(height, tl.full(height.shape, most, tl.float32)), HALF_MAX)
        step = step.to(tl.float16)
        bottom_, step_ = bottom.to(tl.float32), step.to(tl.float32)
        if ETA:  # codes do not depend on it
            tl.store(zero + place, (bottom_ + zero_shift * step_).to(tl.float16), stored)
            tl.store(scale + place, (scale_share * step_).to(tl.float16), stored)
        else:
            tl.store(zero + place, bottom, stored)
            tl.store(scale + place, step, stored)
        step_ = tl.where(step_ == 0, float("inf"), step_)
        if PER_TOKEN == BY_TOKEN:
            bottom_, step_ = bottom_[None, :], step_[None, :]
        else:
            bottom_, step_ = bottom_[:, None], step_[:, None]
        base = tl.where(member == j, bottom_, base)
        divisor = tl.where(member == j, step_, divisor)
    code = tl.math.div_rn(x - base, divisor)
    code = tl.minimum(tl.maximum(code, 0), most) + TO_WHOLE - TO_WHOLE
    code = code.to(tl.int32)
    out = codes + (block * tl.num_programs(1) + tl.program_id(1)) * (D * N * BITS // 32)
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            if BY_TOKEN:
                pack_plane(out, code, token, D, DP, BITS, 8 >> k, NP)
            else:
                pack_plane(out, code, channel, N, NP, BITS, 8 >> k, DP)

"""The kernels that seal blocks: affine codes with their ranges, or the codes of a codebook."""

import triton
import triton.language as tl

from .codes import LANES, index_at, run_width

HALF_MAX = tl.constexpr(65504.0)
CHUNK = tl.constexpr(32)  # elements of a range that are read at a time
# 1.5 * 2^23: a sum with it has no fraction, rounded half to even.
TO_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def range_ends(
    rows, hidden, vector, vector_stride, stride, start, stop,
    A: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Lowest and highest ``[A]`` of the elements ``start`` to ``stop`` of vectors, and whether any is NaN.

    ``vector`` ``[A]``: which vectors, -1 for none; ``hidden``: which elements do not count, where
    ``HIDDEN``. As `affine.group_range`.
    """
    low = tl.full([A], float("inf"), tl.float32)
    high = tl.full([A], float("-inf"), tl.float32)
    nan = tl.zeros([A], tl.int32)
    for first in range(start, stop, CHUNK):
        place = first + tl.arange(0, CHUNK)
        counts = place < stop
        if HIDDEN:
            counts = counts & (tl.load(hidden + place, counts, 1) == 0)
        there = (vector >= 0)[:, None] & counts[None, :]
        at = vector[:, None] * vector_stride + place[None, :] * stride
        x = tl.load(rows + at, there, 0).to(tl.float32)
        nan = tl.maximum(nan, tl.max((x != x).to(tl.int32), 1))
        x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
        low = tl.minimum(low, tl.min(tl.where(there, x, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(there, x, float("-inf")), 1))
    empty = low > high
    return tl.where(empty, 0, low), tl.where(empty, 0, high), tl.max(nan, 0)


@triton.jit
def store_plane(
    out, codes, lane,
    SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Write the plane of ``WIDTH`` bits of codes int32 ``[PADDED, M]``; `unpack.load_codes` reads it."""
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
def tile_order(
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """The tokens and the channels of a head in the order of a tile's codes, -1 for none; and both again, to
    broadcast to the tile."""
    token, channel = tl.arange(0, NP), tl.arange(0, DP)
    if BY_TOKEN:
        token = tl.where(token < N, token, -1)
        channel = index_at(channel, D, DP, BITS)
        t, c = token[None, :], channel[:, None]
    else:
        token = index_at(token, N, NP, BITS)
        channel = tl.where(channel < D, channel, -1)
        t, c = token[:, None], channel[None, :]
    return token, channel, t, c


@triton.jit
def store_tile(
    codes, code, token, channel,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write the codes of a program's block and head, which are in `tile_order`."""
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    out = codes + tile * (D * N * BITS // 32)
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            if BY_TOKEN:
                store_plane(out, code, token, D, DP, BITS, 8 >> k, NP)
            else:
                store_plane(out, code, channel, N, NP, BITS, 8 >> k, DP)


@triton.jit
def seal(
    rows, hidden, codes, scale, zero, found_nan, block_stride, token_stride, C, zero_shift, scale_share,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr, HIDDEN: tl.constexpr,
    ETA: tl.constexpr,
):  # fmt: skip
    """Quantize and pack blocks of states ``x``. Of every range::

        most  = 2**bits - 1
        zero  = fp16(min x)
        scale = fp16(min((max x - zero) / most, 65504))
        code  = clamp(round((x - zero) / scale), 0, most), or 0 where scale is 0

    Where ``ETA``, ``zero + zero_shift * scale`` and ``scale_share * scale`` are stored as zero and scale. The
    reference is `Affine.encode`, which gives the same bits.

    Grid: blocks, heads. Ranges that reach past a head are found by every head in them, and stored by the
    first.

    Args:
        rows: ``[N, n, C]``, any float dtype, contiguous along ``C``, with its strides of blocks and tokens.
        hidden: bool ``[N, n]``, tokens that set no range and are packed as zeros, where ``HIDDEN``.
        codes: tiles of all heads by int32, to write.
        scale: fp16 ``[N, ranges, n]`` where ``PER_TOKEN``, otherwise ``[N, ranges, C]``, to write; as
            ``zero``.
        found_nan: int32 ``[1]``, set where a range has NaN.
        D: channels of a head, ``DP`` as a power of two; ``N``: tokens of a block, ``NP`` as a power of two.
        GROUP: channels of a range where ``PER_TOKEN``, otherwise tokens.
        BY_TOKEN: whether lanes of a tile are tokens; otherwise they are channels.
    """
    block, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * D
    most: tl.constexpr = (1 << BITS) - 1
    rows += block * block_stride
    if HIDDEN:
        hidden += block * N
    token, channel, t, c = tile_order(D, DP, N, NP, BITS, BY_TOKEN)
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
    zeros, divisors = tl.zeros_like(x), tl.full(x.shape, 1, tl.float32)
    for j in range(begin, end):
        if PER_TOKEN:
            stop = tl.minimum((j + 1) * GROUP, C)
            low, high, nan = range_ends(rows, hidden, token, token_stride, 1, j * GROUP, stop, NP, HIDDEN)
            # Of the one program in which the range begins. Triton 3.9's interpreter cannot join a block
            # and a scalar by &.
            stored = tl.where(j * GROUP >= first, token, -1) >= 0
            place = (block * ranges + j) * N + token
        else:
            vector = tl.where(channel >= 0, first + channel, -1)
            stop = tl.minimum((j + 1) * GROUP, N)
            low, high, nan = range_ends(rows, hidden, vector, 1, token_stride, j * GROUP, stop, DP, HIDDEN)
            place, stored = (block * ranges + j) * C + vector, channel >= 0
        tl.store(found_nan, nan, nan > 0)
        zero16 = low.to(tl.float16)
        height = tl.maximum(high - zero16.to(tl.float32), 0)
        scale16 = tl.minimum(tl.math.div_rn(height, tl.full(height.shape, most, tl.float32)), HALF_MAX)
        scale16 = scale16.to(tl.float16)
        zero32, scale32 = zero16.to(tl.float32), scale16.to(tl.float32)
        if ETA:  # codes do not depend on it
            tl.store(zero + place, (zero32 + zero_shift * scale32).to(tl.float16), stored)
            tl.store(scale + place, (scale_share * scale32).to(tl.float16), stored)
        else:
            tl.store(zero + place, zero16, stored)
            tl.store(scale + place, scale16, stored)
        scale32 = tl.where(scale32 == 0, float("inf"), scale32)
        if PER_TOKEN == BY_TOKEN:
            zero32, scale32 = zero32[None, :], scale32[None, :]
        else:
            zero32, scale32 = zero32[:, None], scale32[:, None]
        zeros = tl.where(member == j, zero32, zeros)
        divisors = tl.where(member == j, scale32, divisors)
    code = tl.math.div_rn(x - zeros, divisors)
    code = tl.minimum(tl.maximum(code, 0), most) + TO_WHOLE - TO_WHOLE
    store_tile(codes, code.to(tl.int32), token, channel, D, DP, N, NP, BITS, BY_TOKEN)


@triton.jit
def assign(
    rows, edges, codes, plain, C,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BITS: tl.constexpr,
    BY_TOKEN: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Find and pack the codes of a codebook: how many edges are below a number, as `codebook.nearest`.

    Grid: blocks, heads.

    Args:
        rows: fp32 ``[N, n, C]``, scaled to the range of the levels.
        edges: fp32 ``[2**BITS - 1]``, rising.
        codes: as `seal`.
        plain: uint8 ``[N, n, C]``, the codes without an order, to write where ``PLAIN``.
    """
    token, channel, t, c = tile_order(D, DP, N, NP, BITS, BY_TOKEN)
    there = (t >= 0) & (c >= 0)
    at = tl.program_id(0).to(tl.int64) * N * C + t * C + tl.program_id(1) * D + c
    x = tl.load(rows + at, there, 0)
    code = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(BITS):
        more = code + (1 << (BITS - 1 - k))
        code = tl.where(x > tl.load(edges + more - 1), more, code)
    if PLAIN:
        tl.store(plain + at, code.to(tl.uint8), there)
    store_tile(codes, code, token, channel, D, DP, N, NP, BITS, BY_TOKEN)

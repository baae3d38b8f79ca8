"""Packed blocks to numbers, inside a Triton kernel: codes in tiles, ranges, outliers (docs/format.md).

What a tile is summed over comes in natural order where all of it comes at once and its length is a power of
two; otherwise in chunks, or with holes: `order` says which, and both operands of a product follow it.
Every byte of codes is loaded once.
"""

import triton
import triton.language as tl

# How far a range reaches within a block and a head, see `describe.Side`.
TILE = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
TOKEN = tl.constexpr(2)
LANES = tl.constexpr(16)
UNITS = tl.constexpr(0x6400)  # fp16 1024, whose low bits count


@triton.jit
def field(blocks, number: tl.constexpr, each, at, dtype: tl.constexpr):
    """Where a field of a block lies, by a table of addresses ``[fields, each]``."""
    address = tl.load(blocks + number * each + at)
    return tl.multiple_of(address, 16).to(tl.pointer_type(dtype))


@triton.constexpr_function
def run_width(bits: int) -> int:
    """Of the plane with the most runs; two runs at least, which are the halves of a rotation."""
    return min(bits & -bits, 4)


@triton.jit
def order(
    SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, chunk=0
):
    """What is summed over in the first ``COUNT`` places of a chunk of ``PADDED``, -1 where there is nothing.

    Chunks take their part of every run of the packed rows, so that they share no byte.
    """
    place = tl.arange(0, COUNT)
    if SUMMED == PADDED:
        return place
    else:
        run: tl.constexpr = SUMMED * run_width(BITS) // 8
        padded: tl.constexpr = PADDED * run_width(BITS) // 8
        within = chunk * padded + place % padded
        return tl.where(within < run, place // padded * run + within, -1)


@triton.jit
def codes(
    words,
    lane,
    SUMMED: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    M: tl.constexpr,
    chunk=0,
):
    """Codes int32 ``[PADDED, M]`` of a chunk of a head.

    ``words``: its tiles, by int32; ``lane`` ``[M]``: numbers of lanes, -1 where there is none.
    """
    at = lane // LANES * (SUMMED * BITS // 32 * LANES) + lane % LANES
    found = tl.zeros([PADDED, M], tl.int32)
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            found += _plane(words, at, lane >= 0, chunk, SUMMED, PADDED, BITS, 8 >> k, M)
    return found


@triton.jit
def _plane(
    words,
    at,
    there,
    chunk,
    SUMMED: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
):
    """The part of the codes that one plane holds. Rows of several runs of the narrowest plane lie in a run of
    this one, each with holes of its own."""
    shift: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)
    rows: tl.constexpr = SUMMED * run_width(BITS) // 32
    padded: tl.constexpr = PADDED * run_width(BITS) // 32
    row = tl.arange(0, PADDED * WIDTH // 32)
    within = chunk * padded + row % padded
    whole = (within < rows)[:, None] & there[None, :]
    row = SUMMED * shift // 32 + row // padded * rows + within
    word = tl.load(words + row[:, None] * LANES + at[None, :], whole, 0)
    run = tl.arange(0, 8 // WIDTH)[:, None, None, None] * WIDTH
    byte = tl.arange(0, 4)[None, None, :, None] * 8
    part = (word[None, :, None, :] >> (run + byte)) & ((1 << WIDTH) - 1)
    return tl.reshape(part, (PADDED, M)) << shift


@triton.jit
def numbers(found, levels, BITS: tl.constexpr, TABLE: tl.constexpr):
    """What codes stand for before they are scaled, exactly, in fp16: levels, or codes around 0."""
    if TABLE:
        return tl.load(levels + found)
    else:
        return (found | UNITS).to(tl.int16).to(tl.float16, bitcast=True) - (1024 + (1 << BITS) // 2)


@triton.jit
def along(blocks, each, at, place, K: tl.constexpr):
    """Scales and zeros fp32 ``[K]`` that lie at ``place`` ``[K]``, -1 where there is none. Two and two are
    neighbours.

    Both in one load, and by words: what is narrower, or no factor of a product, is not loaded ahead.
    """
    table = blocks + (1 + tl.arange(0, 2)) * each + at
    base = tl.load(table).to(tl.pointer_type(tl.int32))
    even = tl.min(tl.reshape(place, (K // 2, 2)), 1)
    word = tl.load(base[:, None] + (even // 2)[None, :], (even >= 0)[None, :], 0)
    low, high = (word & 0xFFFF).to(tl.int16), (word >> 16).to(tl.int16)
    both = tl.interleave(low, high).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.split(tl.trans(both))


@triton.jit
def ranges(
    blocks,
    each,
    at,
    token,
    channel,
    first,
    N: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
    C,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """fp32 scale of `numbers`, and what they then lack: ``[DP]`` or ``[NP]`` where ranges differ along one
    axis alone, otherwise ``[DP, NP]`` or, with ``TOKENS_FIRST``, ``[NP, DP]``.

    ``token`` ``[NP]`` and ``channel`` ``[DP]``: which, -1 where there is none; ``first``: the channel of the
    token that the head begins with.
    """
    if SPAN == CHANNEL:
        step, base = along(blocks, each, at, tl.where(channel >= 0, first + channel, -1), DP)
    elif SPAN == TOKEN:
        place = tl.where(token >= 0, first // GROUP * N + token, -1)
        step, base = along(blocks, each, at, place, NP)
    else:
        scale, zero = field(blocks, 1, each, at, tl.float16), field(blocks, 2, each, at, tl.float16)
        if TOKENS_FIRST:
            t, c = token[:, None], channel[None, :]
        else:
            t, c = token[None, :], channel[:, None]
        if PER_TOKEN:
            place = (first + c) // GROUP * N + t
        else:
            place = t // GROUP * C + first + c
        step = tl.load(scale + place, (t >= 0) & (c >= 0), 0).to(tl.float32)
        base = tl.load(zero + place, (t >= 0) & (c >= 0), 0).to(tl.float32)
    if not TABLE:
        base += step * ((1 << BITS) // 2)
    return step, base


@triton.jit
def outliers(
    counts,
    excess,
    channels,
    token,
    channel,
    first,
    D: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
):
    """What a head's outliers of a block are more than their codes say, fp32 ``[DP, NP]``, or ``[NP, DP]``.

    ``token`` ``[NP]`` and ``channel`` ``[DP]`` as in `ranges`.
    """
    count = tl.load(counts + token, token >= 0, 0).to(tl.int32)
    start = tl.cumsum(count, 0) - count
    # A token's outliers lie by channel: those of this head follow those of the heads before it.
    before, own = tl.zeros([NP], tl.int32), tl.zeros([NP], tl.int32)
    for i in range(tl.max(count, 0)):
        c = (tl.load(channels + start + i, i < count, -1).to(tl.int32) & 0xFFFF) - first
        before += ((i < count) & (c < 0)).to(tl.int32)
        own += ((i < count) & (c >= 0) & (c < D)).to(tl.int32)
    start += before
    if TOKENS_FIRST:
        tile = tl.zeros([NP, DP], tl.float32)
    else:
        tile = tl.zeros([DP, NP], tl.float32)
    for i in range(tl.max(own, 0)):
        c = (tl.load(channels + start + i, i < own, 0).to(tl.int32) & 0xFFFF) - first
        more = tl.load(excess + start + i, i < own, 0).to(tl.float32)
        if TOKENS_FIRST:
            tile += tl.where(c[:, None] == channel[None, :], more[:, None], 0)
        else:
            tile += tl.where(c[None, :] == channel[:, None], more[None, :], 0)
    return tile


@triton.jit
def decoded(
    blocks,
    each,
    at,
    found,
    token,
    channel,
    first,
    D: tl.constexpr,
    N: tl.constexpr,
    C,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    SPARSE: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
):
    """`numbers` ``[DP, NP]``, or ``[NP, DP]``, in their ranges, with outliers: fp32."""
    step, base = ranges(
        blocks, each, at, token, channel, first, N, NP, DP, C,
        BITS, TABLE, PER_TOKEN, SPAN, GROUP, TOKENS_FIRST,
    )  # fmt: skip
    if SPAN != TILE:
        if (SPAN == TOKEN) == TOKENS_FIRST:
            step, base = step[:, None], base[:, None]
        else:
            step, base = step[None, :], base[None, :]
    states = found.to(tl.float32) * step + base
    if SPARSE:
        counts = field(blocks, 3, each, at, tl.uint8 if SPARSE == 1 else tl.int16)
        excess = field(blocks, 4, each, at, tl.float16)
        numbered = field(blocks, 5, each, at, tl.int16)
        states += outliers(counts, excess, numbered, token, channel, first, D, TOKENS_FIRST, NP, DP)
    return states

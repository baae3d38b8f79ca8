"""Packed blocks to numbers, inside a Triton kernel: codes in tiles, ranges, outliers (docs/format.md).

A tile is the left side of a product: ``[M, K]``, lanes by what is summed over. It is made so that a thread
has in registers what its matrix instruction takes, without a word to other threads: from packed words only by
shifts by constants, masks and views. So what is summed over comes in the order of `coded`, and the right side
follows it: what stands in even places of a run of words first, then what stands in odd ones. Every byte of
codes is loaded once.
"""

import triton
import triton.language as tl

# How far a range reaches within a block and a head, see `operand.KernelOperand`.
TILE = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
TOKEN = tl.constexpr(2)
LANES = tl.constexpr(16)
SMALL = tl.constexpr(0.25)  # of a state: a rotation of the largest that is stored stays within fp16


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
def order(place, SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, chunk=0):
    """What is summed over in these places of a chunk of ``PADDED``, run by run, -1 where there is nothing.

    Chunks take their part of every run of the packed rows, so that they share no byte.
    """
    if SUMMED == PADDED:
        return place
    else:
        run: tl.constexpr = SUMMED * run_width(BITS) // 8
        padded: tl.constexpr = PADDED * run_width(BITS) // 8
        within = chunk * padded + place % padded
        return tl.where(within < run, place // padded * run + within, -1)


@triton.jit
def coded(
    SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, chunk=0
):
    """The same in the order of tiles, the first ``COUNT`` of it: even places, then odd ones."""
    place = tl.arange(0, COUNT)
    place = place % (PADDED // 2) * 2 + place // (PADDED // 2)
    return order(place, SUMMED, PADDED, BITS, chunk)


@triton.jit
def lanes(COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Lanes of a tile as `ranges` takes them: even ones, then odd ones, -1 from ``COUNT`` on."""
    place = coded(PADDED, PADDED, 8, PADDED)
    return tl.where(place < COUNT, place, -1)


@triton.constexpr_function
def in_mantissas(width: int, bits: int, low: int) -> int:
    """A mask of the part of a code from bit ``low`` on, at the top of the mantissas of two halves."""
    return (((1 << width) - 1) << (10 - bits + low)) * 0x10001


@triton.constexpr_function
def exponents(bits: int) -> int:
    """Of 2^bits, in two halves."""
    return ((15 + bits) << 10) * 0x10001


@triton.jit
def shifted(word, BY: tl.constexpr):
    """To the right, where ``BY`` is not negative."""
    if BY >= 0:
        return word >> BY
    else:
        return word << -BY


@triton.jit
def stacked(word, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr):
    """A word shifted by FIRST, FIRST + STEP, ..., and masked: as many new axes of two as ``COUNT`` has bits,
    the highest last."""
    if COUNT == 1:
        return shifted(word, FIRST) & MASK
    else:
        half: tl.constexpr = COUNT // 2
        return tl.join(
            stacked(word, FIRST, half, STEP, MASK),
            stacked(word, FIRST + half * STEP, half, STEP, MASK),
        )


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
    """The part of `pairs` that one plane holds. Rows of several runs of the narrowest plane lie in a run of
    this one, each with holes of its own."""
    low: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)  # the bit of the code that it begins with
    runs: tl.constexpr = WIDTH // run_width(BITS)
    rows: tl.constexpr = SUMMED * run_width(BITS) // 32
    padded: tl.constexpr = PADDED * run_width(BITS) // 32
    within = chunk * padded + tl.arange(0, padded)[None, :]
    row = SUMMED * low // 32 + tl.arange(0, runs)[:, None] * rows + within
    place = words + at[:, None, None] + row[None, :, :] * LANES
    word = tl.load(place, there[:, None, None] & (within < rows)[None, :, :], 0)
    # Codes of bytes 0 and 2, or 1 and 3, come together, and go to the top of the mantissas of two halves.
    count: tl.constexpr = 16 // WIDTH
    part = stacked(word, BITS - low - 10, count, WIDTH, in_mantissas(WIDTH, BITS, low))
    if count == 2:
        part = tl.permute(part, (0, 3, 1, 2))
    elif count == 4:
        part = tl.permute(part, (0, 4, 3, 1, 2))
    elif count == 8:
        part = tl.permute(part, (0, 5, 4, 3, 1, 2))
    else:
        part = tl.permute(part, (0, 6, 5, 4, 3, 1, 2))
    return tl.reshape(part, (M, PADDED // 2))


@triton.jit
def pairs(
    words,
    lane,
    SUMMED: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    M: tl.constexpr,
    chunk=0,
):
    """Two and two codes of a chunk of a head, int32 ``[M, PADDED / 2]``, each at the top of the mantissa of a
    half.

    ``words``: its tiles, by int32; ``lane`` ``[M]``: numbers of lanes, -1 where there is none.
    """
    at = lane // LANES * (SUMMED * BITS // 32 * LANES) + lane % LANES
    if BITS & 8:
        return _plane(words, at, lane >= 0, chunk, SUMMED, PADDED, BITS, 8, M)
    found = tl.zeros([M, PADDED // 2], tl.int32)
    for k in tl.static_range(3):
        if BITS & (4 >> k):
            found = found | _plane(words, at, lane >= 0, chunk, SUMMED, PADDED, BITS, 4 >> k, M)
    return found


@triton.jit
def halves(pair, M: tl.constexpr, K: tl.constexpr):
    """int32 ``[M, K / 2]`` as fp16 ``[M, K]``."""
    low = pair.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (M, K))


@triton.jit
def numbers(
    pair, levels, BITS: tl.constexpr, TABLE: tl.constexpr, M: tl.constexpr, K: tl.constexpr
):
    """SMALL of what codes of `pairs` stand for before they are scaled, exactly, in fp16: of levels, or of
    codes from which their `middle` is taken away."""
    if TABLE:
        most: tl.constexpr = (1 << BITS) - 1
        low, high = (pair >> (10 - BITS)) & most, (pair >> (26 - BITS)) & most
        return tl.load(levels + tl.reshape(tl.join(low, high), (M, K))) * SMALL
    else:
        # With the exponent of 2^BITS / 4, a mantissa is that and a quarter of the code.
        return halves(pair | exponents(BITS - 2), M, K) - (0.375 * (1 << BITS))


@triton.constexpr_function
def middle(bits: int, table: bool) -> float:
    """Of the codes, which `numbers` takes away."""
    return 0 if table else (1 << bits) / 2


@triton.jit
def along(blocks, each, at, place, K: tl.constexpr):
    """Scales and zeros, fp16 ``[K]`` each in the order of `coded`, whose first half lies at ``place``
    ``[K / 2]``, -1 where there is none; what follows it is its neighbour.

    By words: what is narrower is not loaded ahead.
    """
    scale, zero = field(blocks, 1, each, at, tl.int32), field(blocks, 2, each, at, tl.int32)
    words = tl.load(scale + place // 2, place >= 0, 0), tl.load(zero + place // 2, place >= 0, 0)
    return _neighbours(words[0], K), _neighbours(words[1], K)


@triton.jit
def _neighbours(word, K: tl.constexpr):
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.trans(tl.join(low, high)), (K,))


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
    """fp16 scale of `numbers`, and SMALL of what they then lack: both broadcast to ``[DP, NP]`` or, with
    ``TOKENS_FIRST``, ``[NP, DP]``.

    ``token`` ``[NP]`` and ``channel`` ``[DP]``: which, even ones first, -1 where there is none; ``first``:
    the channel of the token that the head begins with.
    """
    if SPAN == CHANNEL:
        even = tl.min(tl.reshape(channel, (2, DP // 2)), 0)
        step, base = along(blocks, each, at, tl.where(even >= 0, first + even, -1), DP)
    elif SPAN == TOKEN:
        even = tl.min(tl.reshape(token, (2, NP // 2)), 0)
        place = tl.where(even >= 0, first // GROUP * N + even, -1)
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
        there = (t >= 0) & (c >= 0)
        step, base = tl.load(scale + place, there, 0), tl.load(zero + place, there, 0)
    base = base * SMALL + step * (middle(BITS, TABLE) * SMALL)
    if SPAN == TILE:
        return step, base
    elif (SPAN == TOKEN) == TOKENS_FIRST:
        return step[:, None], base[:, None]
    else:
        return step[None, :], base[None, :]


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
    # They lie token by token.
    laid = tl.reshape(tl.trans(tl.reshape(token, (2, NP // 2))), (NP,))
    count = tl.load(counts + laid, laid >= 0, 0).to(tl.int32)
    start = tl.cumsum(count, 0) - count
    count = tl.reshape(tl.trans(tl.reshape(count, (NP // 2, 2))), (NP,))
    start = tl.reshape(tl.trans(tl.reshape(start, (NP // 2, 2))), (NP,))
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
    """SMALL of `numbers` ``[DP, NP]``, or ``[NP, DP]``, in their ranges, with outliers: fp16.

    In halves all the way, two in a register: most of the time of a product goes into this.
    """
    step, base = ranges(
        blocks, each, at, token, channel, first, N, NP, DP, C,
        BITS, TABLE, PER_TOKEN, SPAN, GROUP, TOKENS_FIRST,
    )  # fmt: skip
    states = found * step + base
    if SPARSE:
        counts = field(blocks, 3, each, at, tl.uint8 if SPARSE == 1 else tl.int16)
        excess = field(blocks, 4, each, at, tl.float16)
        numbered = field(blocks, 5, each, at, tl.int16)
        more = outliers(counts, excess, numbered, token, channel, first, D, TOKENS_FIRST, NP, DP)
        states = (states.to(tl.float32) + more * SMALL).to(tl.float16)
    return states

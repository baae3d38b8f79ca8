"""Packed blocks to numbers, inside a Triton kernel (docs/format.md).

A state is ``code * scale + zero``, with ``codebook[code]`` in place of the code where there is one, plus the
residual of an outlier. The kernels hold a QUARTER of it in fp16::

    state / 4 = level * scale + base
    level     = (code - center) / 4       or  codebook[code] / 4
    base      = (zero + center * scale) / 4

A tile is the left side of a product ``[M, K]``: lanes by what is summed over. It is made so that a thread has
in registers what its matrix instruction takes, without a word to other threads: from packed words only by
shifts by constants, masks and views. So the summed axis comes in the order of `tile_order`, and the right
side follows it: what stands in even places of a run of words first, then what stands in odd ones. Every
byte of codes is loaded once.

``LAYOUT`` is the `operand.Layout` of a segment.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# How far a range reaches within a head of a block: see `operand.Layout`.
TILE = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
TOKEN = tl.constexpr(2)

LANES = tl.constexpr(16)  # of a tile
QUARTER = tl.constexpr(
    0.25
)  # of a state: a rotation of the largest that is stored stays within fp16

# The fields of a segment: see `block_table.FIELDS`.
CODES = tl.constexpr(0)
SCALE = tl.constexpr(1)
ZERO = tl.constexpr(2)
OUTLIER_COUNT = tl.constexpr(3)
OUTLIER_EXCESS = tl.constexpr(4)
OUTLIER_CHANNEL = tl.constexpr(5)
GAIN = tl.constexpr(6)
FIELDS = tl.constexpr(7)


class Block(NamedTuple):
    """One block of a segment, by the addresses of its fields."""

    addresses: Any
    """int64 ``[FIELDS, field_stride]``."""
    field_stride: Any
    place: Any
    """Which block."""
    page: Any = None
    """Of an engine, where blocks lie in pages: its number. In `arguments.Pages` each field has the address in
    page 0 at ``place``, and behind it how far pages lie apart."""


@triton.jit
def field(block, number: tl.constexpr, dtype: tl.constexpr):
    """A pointer to a field of a block."""
    found = block.addresses + number * block.field_stride + block.place
    address = tl.load(found)
    if block.page is not None:
        address += block.page * tl.load(found + 1)
    return tl.multiple_of(address, 16).to(tl.pointer_type(dtype))


# -- the order of a tile ---------------------------------------------------------------------------


@triton.constexpr_function
def run_width(bits: int) -> int:
    """The width of the plane with the most runs; at least two runs, which are the halves of a rotation."""
    return min(bits & -bits, 4)


@triton.jit
def index_at(place, SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, chunk=0):
    """The index along the summed axis at each ``place`` of a chunk of ``PADDED`` places, run by run; -1 where
    there is none.

    A chunk takes its part of every run of the packed rows, so that no byte belongs to two chunks.
    """
    if SUMMED == PADDED:
        return place
    else:
        run: tl.constexpr = SUMMED * run_width(BITS) // 8
        padded: tl.constexpr = PADDED * run_width(BITS) // 8
        within = chunk * padded + place % padded
        return tl.where(within < run, place // padded * run + within, -1)


@triton.jit
def tile_order(
    SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, chunk=0
):
    """The indices along the summed axis in the order in which a tile has them, the first ``COUNT``: those in
    even places, then those in odd ones; -1 where there is none."""
    place = tl.arange(0, COUNT)
    place = place % (PADDED // 2) * 2 + place // (PADDED // 2)
    return index_at(place, SUMMED, PADDED, BITS, chunk)


@triton.jit
def lane_order(COUNT: tl.constexpr, PADDED: tl.constexpr):
    """``COUNT`` lanes in the order of `scale_and_base`: even ones, then odd ones; -1 from ``COUNT`` on."""
    place = tile_order(PADDED, PADDED, 8, PADDED)
    return tl.where(place < COUNT, place, -1)


# -- codes -----------------------------------------------------------------------------------------


@triton.constexpr_function
def mantissa_mask(width: int, bits: int, low: int) -> int:
    """The mask of ``width`` bits of a code, from bit ``low`` on, with the code at the top of the mantissas
    of two halves."""
    return (((1 << width) - 1) << (10 - bits + low)) * 0x10001


@triton.constexpr_function
def exponents(bits: int) -> int:
    """The exponent of 2^bits, in two halves."""
    return ((15 + bits) << 10) * 0x10001


@triton.jit
def shifted_right(word, BY: tl.constexpr):
    """A word shifted to the right; to the left where ``BY`` is negative."""
    if BY >= 0:
        return word >> BY
    else:
        return word << -BY


@triton.jit
def bit_fields(
    word, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, MASK: tl.constexpr
):
    """A word shifted by FIRST, FIRST + STEP, ..., and masked: as many new axes of two as ``COUNT`` has bits,
    the highest last."""
    if COUNT == 1:
        return shifted_right(word, FIRST) & MASK
    else:
        half: tl.constexpr = COUNT // 2
        return tl.join(
            bit_fields(word, FIRST, half, STEP, MASK),
            bit_fields(word, FIRST + half * STEP, half, STEP, MASK),
        )


@triton.jit
def _load_plane(
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
    """The part of `load_codes` that the plane of ``WIDTH`` bits holds. Rows of several runs of the narrowest
    plane lie in a run of this one, each with holes of its own."""
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
    part = bit_fields(word, BITS - low - 10, count, WIDTH, mantissa_mask(WIDTH, BITS, low))
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
def load_codes(
    words,
    lane,
    SUMMED: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    M: tl.constexpr,
    chunk=0,
):
    """The codes of a chunk of a head, in the order of `tile_order`: int32 ``[M, PADDED / 2]``, two codes in
    each, at the top of the mantissas of two halves.

    ``words``: the tiles of the head, by int32; ``lane`` ``[M]``: numbers of lanes, -1 where there is none.
    """
    at = lane // LANES * (SUMMED * BITS // 32 * LANES) + lane % LANES
    if BITS & 8:
        return _load_plane(words, at, lane >= 0, chunk, SUMMED, PADDED, BITS, 8, M)
    codes = tl.zeros([M, PADDED // 2], tl.int32)
    for k in tl.static_range(3):
        if BITS & (4 >> k):
            plane = _load_plane(words, at, lane >= 0, chunk, SUMMED, PADDED, BITS, 4 >> k, M)
            codes = codes | plane
    return codes


@triton.jit
def as_halves(word, M: tl.constexpr, K: tl.constexpr):
    """int32 ``[M, K / 2]`` as fp16 ``[M, K]``."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (M, K))


@triton.jit
def levels_of(codes, codebook, LAYOUT: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """The level of each code, exactly, fp16 ``[M, K]``; ``codes`` as of `load_codes`, ``codebook`` fp16
    ``[2**bits]``."""
    BITS: tl.constexpr = LAYOUT.bits
    if LAYOUT.codebook:
        most: tl.constexpr = (1 << BITS) - 1
        low, high = (codes >> (10 - BITS)) & most, (codes >> (26 - BITS)) & most
        return tl.load(codebook + tl.reshape(tl.join(low, high), (M, K))) * QUARTER
    else:
        # With the exponent of 2^BITS / 4, a mantissa is that and a quarter of the code.
        return as_halves(codes | exponents(BITS - 2), M, K) - (0.375 * (1 << BITS))


@triton.constexpr_function
def center(bits: int, codebook: bool) -> float:
    """The middle of the codes, which `levels_of` takes away from them."""
    return 0 if codebook else (1 << bits) / 2


# -- scales and zeros ------------------------------------------------------------------------------


@triton.jit
def _load_along(block, place, K: tl.constexpr):
    """Scales and zeros along an axis, fp16 ``[K]`` each, in the order of `tile_order`.

    ``place`` ``[K / 2]``: where those of the first half lie, -1 where there is none. Those of the second
    half are their neighbours. Both are loaded by words, because what is narrower is not loaded ahead.
    """
    scale, zero = field(block, SCALE, tl.int32), field(block, ZERO, tl.int32)
    words = tl.load(scale + place // 2, place >= 0, 0), tl.load(zero + place // 2, place >= 0, 0)
    return _neighbours(words[0], K), _neighbours(words[1], K)


@triton.jit
def _neighbours(word, K: tl.constexpr):
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.trans(tl.join(low, high)), (K,))


@triton.jit
def scale_and_base(
    block,
    token,
    channel,
    first,
    N: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
    C,
    LAYOUT: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """``scale`` and ``base`` in fp16, both broadcast to ``[DP, NP]`` or, with ``TOKENS_FIRST``, ``[NP, DP]``.

    ``token`` ``[NP]`` and ``channel`` ``[DP]``: those of the tile, even ones first, -1 where there is none;
    ``first``: the channel of the token that the head begins with.
    """
    SPAN: tl.constexpr = LAYOUT.span
    if SPAN == CHANNEL:
        even = tl.min(tl.reshape(channel, (2, DP // 2)), 0)
        scale, base = _load_along(block, tl.where(even >= 0, first + even, -1), DP)
    elif SPAN == TOKEN:
        even = tl.min(tl.reshape(token, (2, NP // 2)), 0)
        place = tl.where(even >= 0, first // LAYOUT.group * N + even, -1)
        scale, base = _load_along(block, place, NP)
    else:
        scales, zeros = field(block, SCALE, tl.float16), field(block, ZERO, tl.float16)
        if TOKENS_FIRST:
            t, c = token[:, None], channel[None, :]
        else:
            t, c = token[None, :], channel[:, None]
        if LAYOUT.per_token:
            place = (first + c) // LAYOUT.group * N + t
        else:
            place = t // LAYOUT.group * C + first + c
        there = (t >= 0) & (c >= 0)
        scale, base = tl.load(scales + place, there, 0), tl.load(zeros + place, there, 0)
    base = base * QUARTER + scale * (center(LAYOUT.bits, LAYOUT.codebook) * QUARTER)
    if SPAN == TILE:
        return scale, base
    elif (SPAN == TOKEN) == TOKENS_FIRST:
        return scale[:, None], base[:, None]
    else:
        return scale[None, :], base[None, :]


# -- outliers --------------------------------------------------------------------------------------


@triton.jit
def residuals(
    counts,
    residual,
    channels,
    token,
    channel,
    first,
    D: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
):
    """The residuals of a head's outliers in a block, 0 elsewhere: fp32 ``[DP, NP]``, or ``[NP, DP]``.

    ``counts``, ``residual`` and ``channels``: the fields of the outliers; ``token`` ``[NP]`` and ``channel``
    ``[DP]`` as in `scale_and_base`.
    """
    # They lie token by token.
    by_token = tl.reshape(tl.trans(tl.reshape(token, (2, NP // 2))), (NP,))
    count = tl.load(counts + by_token, by_token >= 0, 0).to(tl.int32)
    start = tl.cumsum(count, 0) - count
    count = tl.reshape(tl.trans(tl.reshape(count, (NP // 2, 2))), (NP,))
    start = tl.reshape(tl.trans(tl.reshape(start, (NP // 2, 2))), (NP,))
    # A token's outliers lie by channel: those of this head follow those of the heads before it.
    before, of_head = tl.zeros([NP], tl.int32), tl.zeros([NP], tl.int32)
    for i in range(tl.max(count, 0)):
        c = (tl.load(channels + start + i, i < count, -1).to(tl.int32) & 0xFFFF) - first
        before += ((i < count) & (c < 0)).to(tl.int32)
        of_head += ((i < count) & (c >= 0) & (c < D)).to(tl.int32)
    start += before
    if TOKENS_FIRST:
        tile = tl.zeros([NP, DP], tl.float32)
    else:
        tile = tl.zeros([DP, NP], tl.float32)
    for i in range(tl.max(of_head, 0)):
        c = (tl.load(channels + start + i, i < of_head, 0).to(tl.int32) & 0xFFFF) - first
        x = tl.load(residual + start + i, i < of_head, 0).to(tl.float32)
        if TOKENS_FIRST:
            tile += tl.where(c[:, None] == channel[None, :], x[:, None], 0)
        else:
            tile += tl.where(c[None, :] == channel[:, None], x[None, :], 0)
    return tile


@triton.jit
def decode(
    block,
    level,
    token,
    channel,
    first,
    D: tl.constexpr,
    N: tl.constexpr,
    C,
    LAYOUT: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
):
    """A quarter of the states of a head of a block, ``level * scale + base`` and residuals, in fp16: shape
    ``[DP, NP]`` or, with ``TOKENS_FIRST``, ``[NP, DP]``.

    It computes in halves, two in a register: most of the time of a product goes into this.
    """
    scale, base = scale_and_base(block, token, channel, first, N, NP, DP, C, LAYOUT, TOKENS_FIRST)
    states = level * scale + base
    COUNT_BYTES: tl.constexpr = LAYOUT.count_bytes
    if COUNT_BYTES:
        counts = field(block, OUTLIER_COUNT, tl.uint8 if COUNT_BYTES == 1 else tl.int16)
        residual = field(block, OUTLIER_EXCESS, tl.float16)
        channels = field(block, OUTLIER_CHANNEL, tl.int16)
        tile = residuals(counts, residual, channels, token, channel, first, D, TOKENS_FIRST, NP, DP)
        states = (states.to(tl.float32) + tile * QUARTER).to(tl.float16)
    return states

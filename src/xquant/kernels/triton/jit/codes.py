"""Packed codes to numbers two in a word, inside a Triton kernel (docs/format.md).

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

from .halves import add, bits_of, constant, masked_or, multiply_add, twice

LANES = tl.constexpr(16)  # of a tile
QUARTER = tl.constexpr(0.25)  # of a state: a rotation of the largest that is stored stays within fp16

FIELDS = tl.constexpr(8)  # of a segment: see `addresses.FIELDS`


class Block(NamedTuple):
    """The addresses of the fields of one block of a segment, int64; of those that there are not, anything."""

    codes: Any
    scale: Any
    zero: Any
    outlier_count: Any
    outlier_excess: Any
    outlier_channel: Any
    gain: Any


@triton.jit
def block_at(addresses, stride):
    """The block whose fields have their addresses at ``addresses``, ``stride`` apart."""
    return Block(
        tl.load(addresses),
        tl.load(addresses + stride),
        tl.load(addresses + 2 * stride),
        tl.load(addresses + 3 * stride),
        tl.load(addresses + 4 * stride),
        tl.load(addresses + 5 * stride),
        tl.load(addresses + 6 * stride),
    )


@triton.jit
def moved(block, steps, count):
    """The block ``count`` pages behind ``block``, whose fields lie ``steps`` apart from page to page."""
    return Block(
        block.codes + count * steps.codes,
        block.scale + count * steps.scale,
        block.zero + count * steps.zero,
        block.outlier_count + count * steps.outlier_count,
        block.outlier_excess + count * steps.outlier_excess,
        block.outlier_channel + count * steps.outlier_channel,
        block.gain + count * steps.gain,
    )


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """A pointer to a field of a block."""
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
def tile_order(SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, chunk=0):
    """The indices along the summed axis in the order in which a tile has them, the first ``COUNT``: those in
    even places, then those in odd ones; -1 where there is none."""
    place = tl.arange(0, COUNT)
    place = place % (PADDED // 2) * 2 + place // (PADDED // 2)
    return index_at(place, SUMMED, PADDED, BITS, chunk)


@triton.jit
def in_tile_order(x, K: tl.constexpr, R: tl.constexpr):
    """Rows ``[K, R]``, of places in their own order, in that of `tile_order`."""
    return tl.reshape(tl.permute(tl.reshape(x, (K // 2, 2, R)), (1, 0, 2)), (K, R))


@triton.jit
def lane_order(COUNT: tl.constexpr, PADDED: tl.constexpr):
    """``COUNT`` lanes; -1 from ``COUNT`` on."""
    place = tl.arange(0, PADDED)
    return tl.where(place < COUNT, place, -1)


# -- codes -----------------------------------------------------------------------------------------

# What codes become, two in a word; four where they stay BYTES.
BYTES = tl.constexpr(0)  # the code; of those in bytes 0 and 2, or 1 and 3, LEVEL makes a word each
LEVEL = tl.constexpr(1)  # a quarter of it
CENTERED = tl.constexpr(2)  # a quarter of what it is more than `center`


@triton.constexpr_function
def planes(bits: int) -> int:
    return bits.bit_count()


@triton.constexpr_function
def center(bits: int) -> int:
    """The middle of the codes."""
    return 1 << (bits - 1)


@triton.constexpr_function
def taken_away(bits: int, form: int) -> float:
    """A quarter of what a form takes away from codes."""
    return 0.25 * center(bits) if form == 2 else 0.0


@triton.jit
def shifted_right(word, BY: tl.constexpr):
    """A word shifted to the right; to the left where ``BY`` is negative."""
    if BY >= 0:
        return word >> BY
    else:
        return word << -BY


@triton.jit
def in_place(word, NUMBER: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr):
    """Of codes of one plane, those of field NUMBER of both halves, as LEVEL or CENTERED. They stand in the
    mantissa of 1024 where they stand in their byte."""
    at: tl.constexpr = NUMBER * BITS % 8
    mask: tl.constexpr = ((1 << BITS) - 1) << at
    part = masked_or(shifted_right(word, NUMBER * BITS // 8 * 8), mask, bits_of(1024.0))
    unit: tl.constexpr = 0.25 / (1 << at)
    return multiply_add(part, constant(unit), constant(-1024 * unit - taken_away(BITS, FORM)))


@triton.jit
def at_top(word, NUMBER: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Of the plane of ``WIDTH`` bits, field NUMBER of both halves, in its bits of a code that stands at the
    top of the mantissa."""
    low: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)  # the bit of the code that it begins with
    mask: tl.constexpr = ((1 << WIDTH) - 1) << (10 - BITS + low)
    return shifted_right(word, BITS - low - 10 + NUMBER * WIDTH) & twice(mask)


@triton.jit
def in_bytes(word, NUMBER: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Of the plane of ``WIDTH`` bits, field NUMBER of all bytes, in its bits of a code."""
    low: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)
    mask: tl.constexpr = ((1 << WIDTH) - 1) << low
    return shifted_right(word, NUMBER * WIDTH - low) & twice(mask * 0x101)


@triton.jit
def bit_fields(
    word,
    NUMBER: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The fields NUMBER, NUMBER + 1, ... of a plane: as many new axes of two as ``COUNT`` has bits, the
    highest last."""
    if COUNT == 1:
        if FORM == BYTES:
            return in_bytes(word, NUMBER, BITS, WIDTH)
        elif planes(BITS) > 1:
            return at_top(word, NUMBER, BITS, WIDTH)
        else:
            return in_place(word, NUMBER, BITS, FORM)
    else:
        half: tl.constexpr = COUNT // 2
        return tl.join(
            bit_fields(word, NUMBER, half, BITS, WIDTH, FORM),
            bit_fields(word, NUMBER + half, half, BITS, WIDTH, FORM),
        )


@triton.jit
def _load_plane(
    words, lane, chunk,
    SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The words of the plane of ``WIDTH`` bits, int32 ``[M, runs, rows]``. Rows of several runs of the
    narrowest plane lie in a run of this one, each with holes of its own."""
    runs: tl.constexpr = WIDTH // run_width(BITS)
    rows: tl.constexpr = SUMMED * run_width(BITS) // 32
    padded: tl.constexpr = PADDED * run_width(BITS) // 32
    first: tl.constexpr = SUMMED * (BITS // (2 * WIDTH) * (2 * WIDTH)) // 32
    M: tl.constexpr = lane.shape[0]
    lane = tl.reshape(lane, (M // LANES, LANES))
    at = lane // LANES * (SUMMED * BITS // 32 * LANES) + lane % LANES
    within = chunk * padded + tl.arange(0, padded)[None, :]
    row = first + tl.arange(0, runs)[:, None] * rows + within
    place = words + at[:, None, None, :] + row[None, :, :, None] * LANES
    there = (lane >= 0)[:, None, None, :] & (within < rows)[None, :, :, None]
    word = tl.permute(tl.load(place, there, 0), (0, 3, 1, 2))
    return tl.reshape(word, (M, runs, padded))


@triton.jit
def _unpack_plane(word, BITS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """The part of `unpacked` that a plane of ``WIDTH`` bits holds."""
    # Codes of bytes 0 and 2, or 1 and 3, come together: in one word.
    count: tl.constexpr = (8 if FORM == BYTES else 16) // WIDTH
    part = bit_fields(word, 0, count, BITS, WIDTH, FORM)
    if count == 1:
        pass
    elif count == 2:
        part = tl.permute(part, (0, 3, 1, 2))
    elif count == 4:
        part = tl.permute(part, (0, 4, 3, 1, 2))
    elif count == 8:
        part = tl.permute(part, (0, 5, 4, 3, 1, 2))
    else:
        part = tl.permute(part, (0, 6, 5, 4, 3, 1, 2))
    return tl.reshape(part, (word.shape[0], word.shape[1] * word.shape[2] * count))


@triton.jit
def load_words(words, lane, SUMMED: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, chunk=0):
    """The words of a chunk of a head, of each plane, to give to `unpacked`.

    ``words``: the tiles of the head, by int32; ``lane`` ``[M]``: numbers of lanes, -1 where there is none.
    """
    if BITS & 8:
        return (_load_plane(words, lane, chunk, SUMMED, PADDED, BITS, 8),)
    elif planes(BITS) == 1:
        return (_load_plane(words, lane, chunk, SUMMED, PADDED, BITS, BITS),)
    elif BITS == 7:
        return (
            _load_plane(words, lane, chunk, SUMMED, PADDED, BITS, 4),
            _load_plane(words, lane, chunk, SUMMED, PADDED, BITS, 2),
            _load_plane(words, lane, chunk, SUMMED, PADDED, BITS, 1),
        )
    else:
        wide: tl.constexpr = 4 if BITS & 4 else 2
        narrow: tl.constexpr = BITS - wide
        return (
            _load_plane(words, lane, chunk, SUMMED, PADDED, BITS, wide),
            _load_plane(words, lane, chunk, SUMMED, PADDED, BITS, narrow),
        )


@triton.jit
def unpacked(words, BITS: tl.constexpr, FORM: tl.constexpr):
    """Codes in a ``FORM``, in the order of `tile_order`: int32 ``[M, K / 2]``, two in each, or ``[M, K / 4]``
    of BYTES; ``words`` as of `load_words`."""
    if BITS & 8:
        return _unpack_plane(words[0], BITS, 8, FORM)
    elif planes(BITS) == 1:
        return _unpack_plane(words[0], BITS, BITS, FORM)
    else:
        wide: tl.constexpr = 4 if BITS & 4 else 2
        codes = _unpack_plane(words[0], BITS, wide, FORM)
        if BITS == 7:
            codes = codes | _unpack_plane(words[1], BITS, 2, FORM)
            codes = codes | _unpack_plane(words[2], BITS, 1, FORM)
        else:
            codes = codes | _unpack_plane(words[1], BITS, BITS - wide, FORM)
        if FORM != BYTES:
            # With the exponent of 2^BITS / 4, a mantissa is that and a quarter of the code.
            less: tl.constexpr = -0.25 * (1 << BITS) - taken_away(BITS, FORM)
            codes = add(codes | twice(bits_of(0.25 * (1 << BITS))), constant(less))
        return codes

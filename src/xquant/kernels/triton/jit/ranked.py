"""The kernels that decode ranked codes (quant/ranked.py): the order of a block's channels, and its states.

A state is ``level * size_c * gain_t``. The levels of a channel are those that its windows select, of codes of
the width that belongs to its rank. ``runs`` int32 ``[widths, 3]``, the widest first, has the first rank of
each width, how many channels it has, and the byte in which their codes begin.
"""

import triton
import triton.language as tl

from ....quant.ranked import ABOVE, EVEN
from ....quant.trellis import WIDTHS as ALL
from .codes import block_at

WIDTHS = tl.constexpr(len(ALL))
WINDOWS = tl.constexpr(256)  # entries of a table of levels; there are two for every width
CHUNK = tl.constexpr(32)  # channels that are read at a time
OTHERS = tl.constexpr(128)  # channels that one is compared with at a time
USUAL = tl.constexpr(15 - ABOVE)  # the place of a channel's usual scale
ONE = tl.constexpr(EVEN)  # the place of a gain of 1


@triton.constexpr_function
def code_bits(run: int) -> int:
    return ALL[len(ALL) - 1 - run].code


@triton.constexpr_function
def code_tokens(run: int) -> int:
    return ALL[len(ALL) - 1 - run].tokens


@triton.constexpr_function
def window_bits(run: int) -> int:
    return ALL[len(ALL) - 1 - run].window


@triton.jit
def packed_bytes(address):
    """A pointer to a field of a block, which begins at any byte."""
    return address.to(tl.pointer_type(tl.uint8))


@triton.jit
def nibbles(packed, place, count, there):
    """Numbers of 4 bits at ``place`` of ``count``: those of the second half lie above those of the first."""
    half = (count + 1) // 2
    byte = tl.load(packed + place % half, there, 0).to(tl.int32)
    return (byte >> (place // half * 4)) & 15


@triton.jit
def gains(block, sizes, token, N: tl.constexpr):
    """fp32, of every ``token`` of a block; ``sizes``: see `rank`."""
    packed = packed_bytes(block.gain)
    return tl.load(sizes + nibbles(packed, token, N, token < N) - ONE, token < N, 0)


@triton.jit
def powers(block, usual, channel, C):
    """The logarithms of the scales of channels, in steps."""
    there = channel < C
    packed = packed_bytes(block.scale)
    return nibbles(packed, channel, C, there) + tl.load(usual + channel, there, 0) - USUAL


@triton.jit(do_not_specialize=("columns",))
def rank(order_out, size_out, addresses, usual, sizes, columns, C, RANKED: tl.constexpr):
    """Write the channels of each block by falling scale, of equal scales the lower channel first.

    Grid: blocks, runs of RANKED channels.

    Args:
        order_out: int32 ``[columns, C]``, to write; and ``size_out``, fp32, the scale of each of them.
        addresses: int64 ``[FIELDS, columns]``, of the fields of every block.
        usual: int32 ``[C]``, see `Ranked`.
        sizes: fp32, a pointer to the middle of a table: the number whose logarithm is so many steps.
    """
    place = tl.program_id(0)
    block = block_at(addresses + place, columns)
    own = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    power = powers(block, usual, own, C)
    found = tl.zeros([RANKED], tl.int32)
    for first in range(0, C, OTHERS):
        other = first + tl.arange(0, OTHERS)
        others = powers(block, usual, other, C)
        equal = (others[None, :] == power[:, None]) & (other[None, :] < own[:, None])
        before = ((others[None, :] > power[:, None]) | equal) & (other < C)[None, :]
        found += tl.sum(before.to(tl.int32), 1)
    to = place.to(tl.int64) * C + found
    tl.store(order_out + to, own, own < C)
    tl.store(size_out + to, tl.load(sizes + power, own < C, 0), own < C)


@triton.jit
def plane_at(
    packed, stride, column, there, step,
    STEPS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The part of `code_at` that the plane of ``WIDTH`` bits holds."""
    low: tl.constexpr = BITS // (2 * WIDTH) * (2 * WIDTH)  # the bit of the code that it begins with
    rows: tl.constexpr = STEPS * WIDTH // 8
    row = STEPS * low // 8 + step % rows
    byte = tl.load(packed + row * stride + column, there, 0).to(tl.int32)
    return ((byte >> (step // rows * WIDTH)) & ((1 << WIDTH) - 1)) << low


@triton.jit
def code_at(packed, stride, column, there, step, STEPS: tl.constexpr, BITS: tl.constexpr):
    """The code number ``step`` of ``STEPS`` of each ``column`` of a run of ``stride`` channels."""
    code = step * 0
    for k in tl.static_range(4):
        if BITS & (8 >> k):
            code = code | plane_at(packed, stride, column, there, step, STEPS, BITS, 8 >> k)
    return code


@triton.jit
def levels_at(packed, stride, column, there, token, levels, RUN: tl.constexpr, N: tl.constexpr):
    """The levels, fp32, of tokens and channels of a run: ``token`` and ``column`` broadcast to ``there``."""
    bits: tl.constexpr = code_bits(RUN)
    tokens: tl.constexpr = code_tokens(RUN)
    window_size: tl.constexpr = window_bits(RUN)
    steps: tl.constexpr = N // tokens
    window = (token + column) * 0
    for k in tl.static_range((window_size + bits - 1) // bits):
        # Before the first code comes the last.
        step = (token // tokens + steps - k) % steps
        window = window | (code_at(packed, stride, column, there, step, steps, bits) << (k * bits))
    window = window & ((1 << window_size) - 1)
    table = levels + (WIDTHS - 1 - RUN) * (2 * WINDOWS) + token % tokens * WINDOWS
    return tl.load(table + window, there, 0)


@triton.jit(do_not_specialize=("columns", "tokens"))
def decode(
    rows_out, order, size, addresses, runs, levels, sizes, columns, block_stride, token_stride, C, tokens,
    N: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Write the states of blocks, as `Ranked.decode`, bit for bit.

    Grid: blocks, widths and one more, which writes the zeros of channels without bits.

    Args:
        rows_out: ``[columns, tokens, C]``, any float dtype, contiguous along ``C``, with its strides.
        order, size: of `rank`, as ``addresses``.
        levels: fp32 ``[widths, 2, 256]``, the narrowest first.
        sizes: see `rank`.
    """
    number, part = tl.program_id(0), tl.program_id(1)
    block, token = block_at(addresses + number, columns), tl.arange(0, NP)
    ranks, within = number.to(tl.int64) * C, (token < tokens)[:, None]
    out = rows_out + number.to(tl.int64) * block_stride + token[:, None] * token_stride
    coded = tl.load(runs + 3 * (WIDTHS - 1)) + tl.load(runs + 3 * (WIDTHS - 1) + 1)
    if part == WIDTHS:
        for start in range(coded, C, CHUNK):
            at = start + tl.arange(0, CHUNK)
            channel = tl.load(order + ranks + at, at < C, 0)
            zeros = tl.zeros([NP, CHUNK], tl.float32)
            tl.store(out + channel[None, :], zeros, within & (at < C)[None, :])
    gain, codes = gains(block, sizes, token, N), packed_bytes(block.codes)
    for run in tl.static_range(WIDTHS):
        if part == run:
            first, count = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1)
            packed = codes + tl.load(runs + 3 * run + 2)
            for start in range(0, count, CHUNK):
                at = start + tl.arange(0, CHUNK)
                there = (token < N)[:, None] & (at < count)[None, :]
                level = levels_at(packed, count, at[None, :], there, token[:, None], levels, run, N)
                share = tl.load(size + ranks + first + at, at < count, 0)
                channel = tl.load(order + ranks + first + at, at < count, 0)
                rows = level * share[None, :] * gain[:, None]
                tl.store(out + channel[None, :], rows, there & within)

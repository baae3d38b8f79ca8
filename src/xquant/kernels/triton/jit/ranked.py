"""The kernels that read ranked codes (quant/ranked.py): the order of a block's channels, the scores of keys
that are rebuilt from them, and their sums by the weights of the softmax.

A state is ``level * size_c * gain_t``. The levels of a channel are those that its windows select, of codes of
the width that belongs to its rank. ``runs`` int32 ``[widths, 3]``, the widest first, has the first rank of
each width, how many channels it has, and the byte in which their codes begin.
"""

import triton
import triton.language as tl

from ....quant.ranked import ABOVE, EVEN
from ....quant.trellis import WIDTHS as ALL
from .products import reciprocal
from .rebuild import finished_keys, head_channels, store_scores
from .softmax import LOWEST, Mask
from .unpack import CODES, GAIN, SCALE, Block

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
def packed_bytes(block, number: tl.constexpr):
    """A pointer to a field of a block, which begins at any byte."""
    address = tl.load(block.addresses + number * block.field_stride + block.place)
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
    packed = packed_bytes(block, GAIN)
    return tl.load(sizes + nibbles(packed, token, N, token < N) - ONE, token < N, 0)


@triton.jit
def powers(block, usual, channel, C):
    """The logarithms of the scales of channels, in steps."""
    there = channel < C
    packed = packed_bytes(block, SCALE)
    return nibbles(packed, channel, C, there) + tl.load(usual + channel, there, 0) - USUAL


@triton.jit(do_not_specialize=("columns",))
def rank(order_out, size_out, blocks, usual, sizes, columns, C, RANKED: tl.constexpr):
    """Write the channels of each block by falling scale, of equal scales the lower channel first.

    Grid: columns of blocks, runs of RANKED channels, sequences.

    Args:
        order_out: int32 ``[B, columns, C]``, to write; and ``size_out``, fp32, the scale of each of them.
        blocks: `Blocks`.
        usual: int32 ``[C]``, see `Ranked`.
        sizes: fp32, a pointer to the middle of a table: the number whose logarithm is so many steps.
    """
    place = tl.program_id(2) * columns + tl.program_id(0)
    block = Block(blocks.addresses, tl.num_programs(2) * columns, place)
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
    packed,
    stride,
    column,
    there,
    step,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
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


@triton.jit(
    do_not_specialize=("columns", "limit", "sink_count", "mask_batch_stride", "mask_query_stride")
)
def ranked_scores(
    query,
    sink_columns,
    mask,
    mask_batch_stride,
    mask_query_stride,
    mask_token_stride,
    scores_out,
    blocks,
    order,
    size,
    runs,
    levels,
    sizes,
    matrix,
    bias,
    rope,
    columns,
    limit,
    sink_count,
    C,
    shape,
    scaling,
    softcap,
    D: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Write the scores of queries with keys ``W x + bias`` of ranked codes, as `rebuild.rebuild` those of
    affine ones. Channels are multiplied in the order of their scales, a width after the other; those without
    bits are left out.

    Grid and arguments as there, and:

    Args:
        order, size: of `rank`.
        levels: fp32 ``[widths, 2, 256]``, the narrowest first.
        sizes: see `rank`.
        matrix: `Matrix`, whose data are transposed: ``[C, G D]``.
    """
    column, head, b = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    place = b * columns + column
    block = Block(blocks.addresses, tl.num_programs(2) * columns, place)
    begin, length = tl.load(blocks.begins + column), tl.load(blocks.lengths + column)
    token, channel = tl.arange(0, NP), head_channels(D, HEADS * DP, DP)
    codes, ranks = packed_bytes(block, CODES), place.to(tl.int64) * C
    top = tl.load(size + ranks)  # no state is larger than 8 of it
    product = tl.zeros([NP, HEADS * DP], tl.float32)
    for run in tl.static_range(WIDTHS):
        first, count = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1)
        packed = codes + tl.load(runs + 3 * run + 2)
        for start in range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            there = (token < N)[:, None] & (at < count)[None, :]
            level = levels_at(packed, count, at[None, :], there, token[:, None], levels, run, N)
            share = tl.load(size + ranks + first + at, at < count, 0) * reciprocal(top)
            states = (level * share[None, :]).to(tl.float16)
            row = tl.load(order + ranks + first + at, at < count, 0) * (shape.kv_heads * D)
            there = (at < count)[:, None] & (channel >= 0)[None, :]
            weights = matrix.data + row[:, None] + (head * D + channel)[None, :]
            product = tl.dot(states, tl.load(weights, there, 0), product)
    product *= (gains(block, sizes, token, N) * top)[:, None]
    token = tl.where(token < N, token, -1)
    mask = Mask(mask, mask_batch_stride, mask_query_stride, mask_token_stride)
    if HEADS == 1:
        halves = product, product
    else:
        halves = tl.split(tl.permute(tl.reshape(product, (NP, 2, DP)), (0, 2, 1)))
    for i in tl.static_range(HEADS):
        high, low = finished_keys(
            halves[i], head + i, token, matrix, bias, None, 0.0, rope, D, DP, NP, False, True, False
        )
        store_scores(
            scores_out, high, low, head + i, b, column, token, begin, length, query, sink_columns, mask, rope,
            columns, limit, sink_count, shape, scaling, softcap, D, DP, N, ROWS, SINKS, MASK, SOFTCAP,
        )  # fmt: skip


@triton.jit
def block_scores(scores, row, column, token, rows, N: tl.constexpr):
    """Of a block, ``[NP, ROWS]``; -inf where there is no token or row."""
    there = (row < rows)[None, :] & (token < N)[:, None]
    return tl.load(scores[None, :] + (column * N + token)[:, None], there, float("-inf"))


@triton.jit(do_not_specialize=("columns", "blocks_per_split", "rows"))
def ranked_sums(
    scores,
    sums_out,
    maxima_out,
    blocks,
    order,
    size,
    runs,
    levels,
    sizes,
    columns,
    blocks_per_split,
    rows,
    C,
    first_channel,
    channels,
    sequences,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum states of ranked codes by the softmax of scores, as `sum_states.sum_states` those of affine ones. A
    channel is at another rank in every block, so a program adds to its sums in memory.

    Grid: splits, sequences times runs of ROWS rows. Arguments as there, and as in `ranked_scores`. Sums have
    ``channels`` channels, of which these are ``C``, from ``first_channel`` on.
    """
    split = tl.program_id(0)
    b, first_row = tl.program_id(1) % sequences, tl.program_id(1) // sequences * ROWS
    row, token = first_row + tl.arange(0, ROWS), tl.arange(0, NP)
    row_scores = scores + (b.to(tl.int64) * rows + row) * (columns * N)
    to = (split.to(tl.int64) * sequences + b) * rows + row
    sums_to = sums_out + to * channels + first_channel
    begin, end = split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, columns)
    for first in range(0, C, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        there = (channel < C)[:, None] & (row < rows)[None, :]
        tl.store(
            sums_to[None, :] + channel[:, None],
            tl.zeros([CHUNK, ROWS], tl.float32),
            there,
        )
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    for column in range(begin, end):
        found = block_scores(row_scores, row, column, token, rows, N)
        maximum = tl.maximum(maximum, tl.max(found, 0))
    totals = tl.zeros([NP, ROWS], tl.float32)  # by token, and summed over them at last
    for column in range(begin, end):
        tl.debug_barrier()  # other threads have written what this one adds to
        place = b * columns + column
        block = Block(blocks.addresses, sequences * columns, place)
        codes, ranks = packed_bytes(block, CODES), place.to(tl.int64) * C
        weights = tl.exp(block_scores(row_scores, row, column, token, rows, N) - maximum[None, :])
        totals += weights
        weights = (weights * gains(block, sizes, token, N)[:, None]).to(tl.float16)
        for run in tl.static_range(WIDTHS):
            first, count = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1)
            packed = codes + tl.load(runs + 3 * run + 2)
            for start in range(0, count, CHUNK):
                at = start + tl.arange(0, CHUNK)
                there = (at < count)[:, None] & (token < N)[None, :]
                level = levels_at(packed, count, at[:, None], there, token[None, :], levels, run, N)
                added = tl.dot(level.to(tl.float16), weights)
                added *= tl.load(size + ranks + first + at, at < count, 0)[:, None]
                channel = tl.load(order + ranks + first + at, at < count, 0)
                there = (at < count)[:, None] & (row < rows)[None, :]
                out = sums_to[None, :] + channel[:, None]
                tl.store(out, tl.load(out, there, 0) + added, there)
    tl.store(maxima_out + to * 2, maximum, row < rows)
    tl.store(maxima_out + to * 2 + 1, tl.sum(totals, 0), row < rows)


@triton.jit(do_not_specialize=("columns", "tokens"))
def decode(
    rows_out,
    order,
    size,
    blocks,
    runs,
    levels,
    sizes,
    columns,
    block_stride,
    token_stride,
    C,
    tokens,
    N: tl.constexpr,
    NP: tl.constexpr,
):
    """Write the states of blocks, as `Ranked.decode`, bit for bit.

    Grid: blocks, widths and one more, which writes the zeros of channels without bits.

    Args:
        rows_out: ``[columns, tokens, C]``, any float dtype, contiguous along ``C``, with its strides.
        order, size: of `rank`.
    """
    number, part = tl.program_id(0), tl.program_id(1)
    block, token = Block(blocks.addresses, columns, number), tl.arange(0, NP)
    ranks, within = number.to(tl.int64) * C, (token < tokens)[:, None]
    out = rows_out + number.to(tl.int64) * block_stride + token[:, None] * token_stride
    coded = tl.load(runs + 3 * (WIDTHS - 1)) + tl.load(runs + 3 * (WIDTHS - 1) + 1)
    if part == WIDTHS:
        for start in range(coded, C, CHUNK):
            at = start + tl.arange(0, CHUNK)
            channel = tl.load(order + ranks + at, at < C, 0)
            zeros = tl.zeros([NP, CHUNK], tl.float32)
            tl.store(out + channel[None, :], zeros, within & (at < C)[None, :])
    gain, codes = gains(block, sizes, token, N), packed_bytes(block, CODES)
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

"""The decode kernel: attention of a few queries over packed keys and values."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..arguments import Call, Memory
from .codebook import table_of
from .codes import FIELDS, QUARTER, Block, block_at, index_at, lane_order, moved, tile_order
from .exact import Channels, add_exact, load_rows, store_split
from .halves import as_words
from .outliers import outlier_scores, outlier_sums, outliers_of
from .products import (
    LOW,
    beside_zeros,
    block_scores,
    block_sums,
    folded_sums,
    folds,
    key_words,
    one_column,
    reciprocal,
    two_columns,
    value_words,
)
from .softmax import (
    Mask,
    Softmax,
    blocks_of_split,
    empty_softmax,
    mask_rows,
    seen_scores,
    softmax_weights,
)

VARYING = (
    "columns", "limit", "tail_count", "sink_count", "mask_batch_stride", "mask_query_stride",
)  # fmt: skip
"""What changes from step to step: nothing is compiled anew for it."""


# -- where blocks lie ------------------------------------------------------------------------------


class InSlabs(NamedTuple):
    """The blocks of a sequence of a cache."""

    key: Any
    """Where the addresses of its first block are, of keys and of values."""
    value: Any
    field_stride: Any
    begins: Any
    lengths: Any


class InPages(NamedTuple):
    """The blocks of a sequence of an engine."""

    table: Any
    key: Block
    """Keys and values in page 0, and how far their fields lie apart from page to page."""
    key_steps: Block
    value: Block
    value_steps: Block


@triton.jit
def blocks_of(blocks, b, columns, sequences, PAGED: tl.constexpr):
    """The blocks of sequence ``b``: `InPages` of `Pages`, `InSlabs` of `Blocks`."""
    if PAGED:
        table, key = blocks.table + b * blocks.table_stride, blocks.addresses
        value = key + 2 * FIELDS
        keys, key_steps = block_at(key, 2), block_at(key + 1, 2)
        return InPages(table, keys, key_steps, block_at(value, 2), block_at(value + 1, 2))
    else:
        key, stride = blocks.addresses + b * columns, sequences * columns
        return InSlabs(key, key + FIELDS * stride, stride, blocks.begins, blocks.lengths)


@triton.jit
def page_of(blocks, column, PAGED: tl.constexpr):
    """The page of a block; of a cache, its column."""
    if PAGED:
        return tl.load(blocks.table + column).to(tl.int64)
    else:
        return column


@triton.jit
def keys_and_values(blocks, page, PAGED: tl.constexpr):
    """What is packed in a page, or in a column of a cache: a `Block` of keys, and one of values."""
    if PAGED:
        keys = moved(blocks.key, blocks.key_steps, page)
        return keys, moved(blocks.value, blocks.value_steps, page)
    else:
        keys = block_at(blocks.key + page, blocks.field_stride)
        return keys, block_at(blocks.value + page, blocks.field_stride)


@triton.jit
def span_of(blocks, column, limit, N: tl.constexpr, PAGED: tl.constexpr):
    """The first token of a block, and how many of it are before ``limit``."""
    if PAGED:
        return column * N, limit - column * N
    else:
        begin = tl.load(blocks.begins + column)
        return begin, tl.minimum(tl.load(blocks.lengths + column), limit - begin)


# -- the softmax over blocks -----------------------------------------------------------------------


@triton.jit
def angles_within(rope, token, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr):
    """cos and sin of the place of each ``token`` in its block, by words: see `products.rotated`."""
    half: tl.constexpr = D // 2
    NP: tl.constexpr = token.shape[0]
    # The first half of runs is that of the channels.
    pair = tl.reshape(tile_order(D, DP, BITS, DP), (2, 2, DP // 4))
    pair = tl.reshape(tl.min(pair, 1), (DP // 2,))
    within = token[:, None] * half + pair[None, :]
    both = (token >= 0)[:, None] & (pair >= 0)[None, :]
    cos = tl.load(rope.within_cos + within, both, 0).to(tl.float16)
    sin = tl.load(rope.within_sin + within, both, 0).to(tl.float16)
    return as_words(cos, NP, DP // 2), as_words(sin, NP, DP // 2)


@triton.jit
def partner_states(rows, channels, scaling, half):
    """What RoPE adds to the scaled queries of `HeadRows`, times the sine."""
    states = tl.load(rows.pointer[None, :] + channels.partner[:, None], rows.there, 0)
    states = states.to(tl.float32) * scaling
    return tl.where((channels.key < half)[:, None], states, -states)


@triton.jit
def columns_of_sinks(memory, b, sink_count, SINKS: tl.constexpr, PAGED: tl.constexpr):
    """The places of a sequence's sinks, ``[SINKS]``, -1 where there is none."""
    sink = tl.arange(0, SINKS)
    if PAGED:
        return tl.where(sink < tl.load(memory.runs.sinks + b * 4 + 2), sink, -1)
    else:
        return tl.load(memory.sinks.columns + b * sink_count + sink, sink < sink_count, -1)


@triton.jit
def add_blocks(
    call, mask, memory, tables, rows, b, head, first, stop, columns, limit, sink_count, channels, softmax,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, SINKS: tl.constexpr,
    ROTATE: tl.constexpr, PAGED: tl.constexpr, OFFSET: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Add the blocks in columns from ``first`` to ``stop`` to the softmax of `HeadRows`."""
    half: tl.constexpr = D // 2
    OUTLIERS: tl.constexpr = KEY.count_bytes > 0
    tl.static_assert(KEY.count_bytes == VALUE.count_bytes)
    folded: tl.constexpr = folds(VALUE.span)
    rope, channel, value_channel = memory.rope, channels.key, channels.value
    kv_heads, count = call.shape.kv_heads, call.shape.group_heads * call.shape.queries
    ROWS: tl.constexpr = rows.number.shape[0]
    token = index_at(tl.arange(0, NP), N, NP, VALUE.bits)
    states, partner, within_cos, within_sin = rows.states, tl.zeros_like(rows.states), 0.0, 0.0
    if ROTATE:
        partner = partner_states(rows, channels, call.scaling, half)
        within_cos, within_sin = angles_within(rope, token, D, DP, KEY.bits)
    if SINKS:
        sink_column = columns_of_sinks(memory, b, sink_count, SINKS, PAGED)
    maximum = softmax.maximum
    # By token, and summed over them at last: of weights, and of what `folded_sums` adds up.
    totals = tl.zeros([NP, ROWS], tl.float32)
    rest = tl.zeros([NP, ROWS], tl.float32)
    both_sums = tl.zeros([DP, 2 * ROWS], tl.float32)
    unit = tl.max(tl.sqrt(states * states + partner * partner), 0)[None, :]
    states, partner = states * reciprocal(unit), partner * reciprocal(unit)
    queries = two_columns(states, 1)
    key_table, value_table = table_of(tables.key, KEY), table_of(tables.value, VALUE)
    # Where a block lies is loaded a block ahead.
    blocks = blocks_of(memory.blocks, b, columns, tl.num_programs(1) // kv_heads, PAGED)
    page = page_of(blocks, first, PAGED)
    key_block, value_block = keys_and_values(blocks, page, PAGED)
    begin, length = span_of(blocks, first, limit, N, PAGED)
    for column in range(first, stop):
        key_codes = key_words(key_block, token, head, D, DP, N, KEY.bits)
        value_codes = value_words(value_block, value_channel, head, D, N, NP, VALUE.bits)
        after = tl.minimum(column + 1, stop - 1)
        page_now = page if PAGED else column
        page = page_of(blocks, after, PAGED)
        next_keys, next_values = keys_and_values(blocks, page, PAGED)
        if PAGED:
            next_begin, next_length = begin + N, length - N
        else:
            next_begin, next_length = span_of(blocks, after, limit, N, PAGED)
        start = column if PAGED else b * columns + column
        if ROTATE:
            angle = start * half + channel % half
            start_cos = tl.load(rope.start_cos + angle, channel >= 0, 0)[:, None]
            start_sin = tl.load(rope.start_sin + angle, channel >= 0, 0)[:, None]
            queries = two_columns(states * start_cos + partner * start_sin, 1)
        scores = tl.zeros([NP, 2 * ROWS], tl.float32)
        if OUTLIERS:
            # A block ahead their addresses would take registers from tiles.
            keys_now, values_now = keys_and_values(blocks, page_now, PAGED)
            key_outliers, value_outliers = outliers_of(
                keys_now, values_now, token, head * D, D, KEY.count_bytes
            )
            scores = outlier_scores(
                key_outliers, token, rows.pointer, rows.number < count, rope, start, head * D, D, ROTATE
            )  # fmt: skip
            scores = beside_zeros(scores * (QUARTER * call.scaling * reciprocal(unit)))
        scores = block_scores(
            scores, key_block, key_codes, key_table, tables.offset, queries, token, channel,
            within_cos, within_sin, head, kv_heads, D, DP, N, NP, KEY, OFFSET, ROTATE,
        )  # fmt: skip
        scores *= unit / QUARTER
        seen = (token >= 0) & (token < length)
        if SINKS:
            distance = tl.abs(sink_column[:, None] - begin - token[None, :])
            seen = seen & (tl.min(distance, 0) > 0)
        scores = seen_scores(scores, call.softcap, mask, begin + token, seen[:, None], MASK, SOFTCAP)
        weights, shrink, maximum = softmax_weights(scores, maximum)
        both_sums *= tl.reshape(tl.join(shrink, shrink), (2 * ROWS,))[None, :]
        if folded:
            both_sums, added = folded_sums(
                both_sums, value_block, value_codes, value_table, weights,
                token, value_channel, head, D, DP, N, NP, VALUE,
            )  # fmt: skip
            rest = rest * shrink[None, :] + added
        else:
            both_sums = block_sums(
                both_sums, value_block, value_codes, value_table, two_columns(weights, LOW, True),
                tile_order(N, NP, VALUE.bits, NP), value_channel, head, kv_heads,
                D, DP, N, NP, VALUE,
            )  # fmt: skip
        if OUTLIERS:
            both_sums = outlier_sums(both_sums, value_outliers, weights, value_channel, head * D)
        totals = totals * shrink[None, :] + weights
        key_block, value_block, begin, length = next_keys, next_values, next_begin, next_length
    sums = one_column(both_sums, LOW) / QUARTER
    if folded:
        sums += tl.sum(rest, 0)[None, :]
    return Softmax(maximum, tl.sum(totals, 0), sums)


@triton.jit(do_not_specialize=VARYING)
def attend(
    call, mask_batch_stride, mask_query_stride, memory, columns, limit, tail_count, sink_count, tables,
    sums_out, maxima_out,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
    SINKS: tl.constexpr, ROTATE: tl.constexpr, PAGED: tl.constexpr, OFFSET: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Attention ``softmax(scaling q K^T) V`` by an online softmax (`softmax`), split over programs.

    The first split of each head reads the exact tokens: tail, sinks and the newest. Each of the others reads
    a run of packed blocks, whose keys and values are decoded in registers (`unpack.decode`) and forgotten
    after their product. Every split writes its sums, running maximum and total; `combine` makes the output
    of them, and knows which had no blocks to read. A score is::

        q . k                 of keys that are kept after RoPE
        R(-p) q . R(r) k      of place r of a block that starts at position p, otherwise

    so the query is rotated once a block, and keys by one table for all blocks. The reference is attention
    over `CompressedLayer.read`, from which it differs by roundings to fp16.

    Sequences of a cache are of one length, which numbers say. Where ``PAGED``, they are those of an engine
    (`paged.Sequences`): of unequal length, which memory says, so that the host need not know it.

    Grid: splits, sequences times key/value heads, runs of ROWS rows. Rows of a key/value head are its query
    heads times queries.

    Args:
        call: `Call`, the strides of whose mask change from step to step.
        memory: `Memory`. The FIELDS of keys are before those of values. Where ``PAGED``, exact keys are
            rotated already.
        columns: blocks of each sequence; None where ``PAGED``, as the next three.
        limit: tokens that are read from blocks.
        tail_count: tokens of the tail, as ``sink_count`` of sinks.
        tables: `Tables`.
        sums_out: fp32 ``[splits, B G, rows, D]``, to write.
        maxima_out: fp32 ``[splits, B G, rows, 2]``, to write.
        D: channels of a head, ``DP`` as a power of two; ``N``: tokens of a block, ``NP`` as a power of two.
        SINKS: a power of two from the most sinks on, 0 where there are none.
        ROTATE: whether keys are kept before RoPE. ``OFFSET``: whether they have a bias of their own.
        MASK: a kind of mask, see `softmax`.
        KEY: `operand.Layout` of keys; as ``VALUE``.
    """
    half: tl.constexpr = D // 2
    call, memory = Call(*call), Memory(*memory)  # see `arguments`
    shape, split = call.shape, tl.program_id(0)
    b, head = tl.program_id(1) // shape.kv_heads, tl.program_id(1) % shape.kv_heads
    own = b
    if PAGED:
        own, limit = tl.load(memory.runs.new + b * 4), tl.load(memory.runs.limits + b)
        columns = tl.cdiv(limit, N)
    per_split = blocks_of_split(columns, tl.num_programs(0))
    first = (split - 1) * per_split
    nothing = (split > 0) & (first >= columns)
    if PAGED and nothing:
        return
    channel, value_channel = tile_order(D, DP, KEY.bits, DP), lane_order(D, DP)
    partner = tl.where(channel < half, channel + half, channel - half)
    channels = Channels(channel, partner, value_channel)
    rows = load_rows(call, own, head, tl.program_id(2), channel, ROWS)
    mask_row = mask_rows(mask_batch_stride, mask_query_stride, b, rows.place)
    mask = Mask(call.mask, call.mask_token_stride, mask_row)
    softmax = empty_softmax(ROWS, DP)
    if split == 0:
        softmax = add_exact(
            call, mask, memory, rows, b, head, limit, tail_count, sink_count, channels, softmax,
            D, SINKS, ROTATE and not PAGED, PAGED, MASK, SOFTCAP,
        )  # fmt: skip
    else:
        softmax = add_blocks(
            call, mask, memory, tables, rows, b, head, first, tl.minimum(first + per_split, columns),
            columns, limit, sink_count, channels, softmax,
            D, DP, N, NP, SINKS, ROTATE, PAGED, OFFSET, MASK, SOFTCAP, KEY, VALUE,
        )  # fmt: skip
    count = shape.group_heads * shape.queries
    to = (split.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * count + rows.number
    store_split(sums_out, maxima_out, softmax, to, rows.number < count, value_channel, D)

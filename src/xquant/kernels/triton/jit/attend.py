"""The decode kernel: attention of a few queries over packed keys and values."""

import triton
import triton.language as tl

from .codebook import table_of
from .codes import FIELDS, QUARTER, block_at, index_at, lane_order, moved, tile_order
from .exact import Channels, add_exact, load_rows, queries_of, store_split
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
    LOWEST,
    Mask,
    blocks_of_split,
    mask_rows,
    masked,
    soft_capped,
    softmax_weights,
)

VARYING = (
    "columns", "limits", "new_runs", "tail_runs", "sink_runs", "mask_batch_stride", "mask_query_stride",
)  # fmt: skip
"""What changes from step to step: nothing is compiled anew for it."""


@triton.jit(do_not_specialize=VARYING)
def attend(
    query,
    key,
    value,
    tail,
    sinks,
    mask,
    mask_batch_stride,
    mask_query_stride,
    mask_token_stride,
    blocks,
    rope,
    key_codebook,
    value_codebook,
    offset,
    sums_out,
    maxima_out,
    columns,
    limits,
    new_runs,
    tail_runs,
    sink_runs,
    shape,
    scaling,
    softcap,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
    ROTATE: tl.constexpr,
    PAGED: tl.constexpr,
    OFFSET: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
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
        query: `Heads` ``[B, H, t, D]``; where ``PAGED`` rows of all sequences, ``[T, H, 1, D]``.
        key: `Heads` ``[B, G, t, D]`` of the newest tokens, after RoPE; as ``value``.
        tail: `ExactRows`; as ``sinks``, which may be None. Where ``PAGED`` they are rotated already.
        mask: ``[B, 1, t, T]``, bool or added to scores, with its strides.
        blocks: `Blocks`, with the FIELDS of keys, then those of values; `Pages` where ``PAGED``.
        rope: `BlockRope`, where ``ROTATE``.
        key_codebook: fp16 ``[2**bits]``, where ``KEY.codebook``; as ``value_codebook``.
        offset: fp32 ``[G D]``, the bias of keys, which their codes do without; where ``OFFSET``.
        sums_out: fp32 ``[splits, B G, rows, D]``, to write.
        maxima_out: fp32 ``[splits, B G, rows, 2]``, to write.
        columns: blocks of each sequence, but where ``PAGED``.
        limits: tokens that are read from blocks; where ``PAGED`` int32 ``[B]``.
        new_runs: tokens before the newest; where ``PAGED`` int32 ``[B, 4]``, see `run_of`.
        tail_runs: tokens of the tail; where ``PAGED`` as ``new_runs``, as is ``sink_runs``.
        shape: `Shape`.
        D: channels of a head, ``DP`` as a power of two; ``N``: tokens of a block, ``NP`` as a power of two.
        SINKS: a power of two from the most sinks on, 0 where there are none.
        MASK: a kind of mask, see `softmax`.
        KEY: `operand.Layout` of keys; as ``VALUE``.
    """
    half: tl.constexpr = D // 2
    split = tl.program_id(0)
    b, head = tl.program_id(1) // shape.kv_heads, tl.program_id(1) % shape.kv_heads
    own, limit = b, limits
    if PAGED:
        own, limit = tl.load(new_runs + b * 4), tl.load(limits + b)
        columns = tl.cdiv(limit, N)
    per_split = blocks_of_split(columns, tl.num_programs(0))
    first = (split - 1) * per_split
    nothing = (split > 0) & (first >= columns)
    if PAGED and nothing:
        return
    channel = tile_order(D, DP, KEY.bits, DP)
    partner_channel = tl.where(channel < half, channel + half, channel - half)
    value_channel = lane_order(D, DP)
    token = index_at(tl.arange(0, NP), N, NP, VALUE.bits)

    row, place, pointer, there, states = load_rows(
        query, own, head, tl.program_id(2), channel, shape, scaling, ROWS
    )
    rows = shape.group_heads * shape.queries
    mask = Mask(mask, mask_batch_stride, mask_query_stride, mask_token_stride)
    mask_row = mask_rows(mask, b, place)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([DP, ROWS], tl.float32)
    if split == 0:
        maximum, total, sums = add_exact(
            queries_of(states, place), key, value, tail, sinks,
            mask, mask_row, b, head, limit, new_runs, tail_runs, sink_runs, shape,
            Channels(channel, partner_channel, value_channel), softcap, maximum, total, sums,
            D, ROTATE and not PAGED, PAGED, MASK, SOFTCAP,
        )  # fmt: skip
    else:
        partner, within_cos, within_sin = tl.zeros_like(states), 0.0, 0.0
        if ROTATE:
            partner = tl.load(pointer[None, :] + partner_channel[:, None], there, 0)
            partner = partner.to(tl.float32) * scaling
            partner = tl.where((channel < half)[:, None], partner, -partner)
            # The first half of runs is that of the channels.
            pair = tile_order(D, DP, KEY.bits, DP)
            pair = tl.min(tl.reshape(pair, (2, 2, DP // 4)), 1)
            pair = tl.reshape(pair, (DP // 2,))
            within = token[:, None] * half + pair[None, :]
            both = (token >= 0)[:, None] & (pair >= 0)[None, :]
            within_cos = tl.load(rope.within_cos + within, both, 0).to(tl.float16)
            within_sin = tl.load(rope.within_sin + within, both, 0).to(tl.float16)
            within_cos = as_words(within_cos, NP, DP // 2)
            within_sin = as_words(within_sin, NP, DP // 2)
        if SINKS:
            sink = tl.arange(0, SINKS)
            if PAGED:
                sink_column = tl.where(sink < tl.load(sink_runs + b * 4 + 2), sink, -1)
            else:
                at = sinks.columns + b * sink_runs + sink
                sink_column = tl.load(at, sink < sink_runs, -1)
        field_stride = tl.num_programs(1) // shape.kv_heads * columns
        tl.static_assert(KEY.count_bytes == VALUE.count_bytes)
        OUTLIERS: tl.constexpr = KEY.count_bytes > 0
        folded: tl.constexpr = folds(VALUE.span)
        # By token, and summed over them at last: of weights, and of what `folded_sums` adds up.
        totals = tl.zeros([NP, ROWS], tl.float32)
        rest = tl.zeros([NP, ROWS], tl.float32)
        both_sums = tl.zeros([DP, 2 * ROWS], tl.float32)
        unit = tl.max(tl.sqrt(states * states + partner * partner), 0)[None, :]
        states, partner = states * reciprocal(unit), partner * reciprocal(unit)
        queries = two_columns(states, 1)
        key_table, value_table = table_of(key_codebook, KEY), table_of(value_codebook, VALUE)
        stop = tl.minimum(first + per_split, columns)
        # Where a block lies is loaded a block ahead.
        if PAGED:
            pages = blocks.table + b * blocks.table_stride
            keys, values = block_at(blocks.addresses, 2), block_at(blocks.addresses + 2 * FIELDS, 2)
            key_steps = block_at(blocks.addresses + 1, 2)
            value_steps = block_at(blocks.addresses + 2 * FIELDS + 1, 2)
            page = tl.load(pages + first).to(tl.int64)
            key_block, value_block = moved(keys, key_steps, page), moved(values, value_steps, page)
            begin, length = first * N, limit - first * N
        else:
            at = blocks.addresses + b * columns
            values_at = at + FIELDS * field_stride
            key_block = block_at(at + first, field_stride)
            value_block = block_at(values_at + first, field_stride)
            begin = tl.load(blocks.begins + first)
            length = tl.minimum(tl.load(blocks.lengths + first), limit - begin)
        for column in range(first, stop):
            key_codes = key_words(key_block, token, head, D, DP, N, KEY.bits)
            value_codes = value_words(value_block, value_channel, head, D, N, NP, VALUE.bits)
            after = tl.minimum(column + 1, stop - 1)
            if PAGED:
                start, next_begin, next_length = column, begin + N, length - N
                page_now = page
                page = tl.load(pages + after).to(tl.int64)
                next_keys, next_values = (
                    moved(keys, key_steps, page),
                    moved(values, value_steps, page),
                )
            else:
                start = b * columns + column
                next_begin = tl.load(blocks.begins + after)
                next_length = tl.minimum(tl.load(blocks.lengths + after), limit - next_begin)
                next_keys = block_at(at + after, field_stride)
                next_values = block_at(values_at + after, field_stride)
            if ROTATE:
                angle = start * half + channel % half
                start_cos = tl.load(rope.start_cos + angle, channel >= 0, 0)[:, None]
                start_sin = tl.load(rope.start_sin + angle, channel >= 0, 0)[:, None]
                queries = two_columns(states * start_cos + partner * start_sin, 1)
            scores = tl.zeros([NP, 2 * ROWS], tl.float32)
            if OUTLIERS:
                # A block ahead their addresses would take registers from tiles.
                if PAGED:
                    keys_now = moved(keys, key_steps, page_now)
                    values_now = moved(values, value_steps, page_now)
                else:
                    keys_now = block_at(at + column, field_stride)
                    values_now = block_at(values_at + column, field_stride)
                key_outliers, value_outliers = outliers_of(
                    keys_now, values_now, token, head * D, D, KEY.count_bytes
                )
                scores = outlier_scores(
                    key_outliers, token, pointer, row < rows, rope, start, head * D, D, ROTATE
                )
                scores = beside_zeros(scores * (QUARTER * scaling * reciprocal(unit)))
            scores = block_scores(
                scores, key_block, key_codes, key_table, offset, queries, token, channel,
                within_cos, within_sin, head, shape.kv_heads, D, DP, N, NP, KEY, OFFSET, ROTATE,
            )  # fmt: skip
            scores *= unit / QUARTER
            if SOFTCAP:
                scores = soft_capped(scores, softcap)
            seen = (token >= 0) & (token < length)
            if SINKS:
                distance = tl.abs(sink_column[:, None] - begin - token[None, :])
                seen = seen & (tl.min(distance, 0) > 0)
            scores = masked(scores, mask, mask_row, begin + token, seen[:, None], MASK)
            weights, shrink, maximum = softmax_weights(scores, maximum)
            both_shrink = tl.reshape(tl.join(shrink, shrink), (2 * ROWS,))[None, :]
            both_sums *= both_shrink
            if folded:
                both_sums, added = folded_sums(
                    both_sums,
                    value_block,
                    value_codes,
                    value_table,
                    weights,
                    token,
                    value_channel,
                    head,
                    D,
                    DP,
                    N,
                    NP,
                    VALUE,
                )
                rest = rest * shrink[None, :] + added
            else:
                both_sums = block_sums(
                    both_sums, value_block, value_codes, value_table, two_columns(weights, LOW, True),
                    tile_order(N, NP, VALUE.bits, NP), value_channel, head, shape.kv_heads,
                    D, DP, N, NP, VALUE,
                )  # fmt: skip
            if OUTLIERS:
                both_sums = outlier_sums(
                    both_sums, value_outliers, weights, value_channel, head * D
                )
            totals = totals * shrink[None, :] + weights
            key_block, value_block, begin, length = next_keys, next_values, next_begin, next_length
        total, sums = tl.sum(totals, 0), one_column(both_sums, LOW)
        sums /= QUARTER
        if folded:
            sums += tl.sum(rest, 0)[None, :]

    to = (split.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * rows + row
    there = (row < rows)[None, :] & (value_channel >= 0)[:, None]
    store_split(sums_out, maxima_out, sums, maximum, total, to, row < rows, value_channel, there, D)

"""The decode kernel: attention of a few queries over packed keys and values."""

import triton
import triton.language as tl

from .exact import Channels, Queries, add_exact, load_rows, store_split
from .products import block_scores, block_sums, high_and_low, reciprocal, to_halves
from .softmax import (
    LOWEST,
    Mask,
    blocks_of_split,
    mask_rows,
    masked,
    soft_capped,
    softmax_weights,
)
from .unpack import FIELDS, QUARTER, Block, lane_order, tile_order

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
    token = tile_order(N, NP, VALUE.bits, NP)

    row, place, pointer, there, states = load_rows(
        query, own, head, tl.program_id(2), channel, shape, scaling, ROWS
    )
    mask = Mask(mask, mask_batch_stride, mask_query_stride, mask_token_stride)
    mask_row = mask_rows(mask, b, place)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([DP, ROWS], tl.float32)
    if split == 0:
        high, unit = to_halves(states)
        maximum, total, sums = add_exact(
            Queries(high, unit, place), key, value, tail, sinks,
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
        if SINKS:
            sink = tl.arange(0, SINKS)
            if PAGED:
                sink_column = tl.where(sink < tl.load(sink_runs + b * 4 + 2), sink, -1)
            else:
                at = sinks.columns + b * sink_runs + sink
                sink_column = tl.load(at, sink < sink_runs, -1)
        field_stride = tl.num_programs(1) // shape.kv_heads * columns
        totals = tl.zeros([NP, ROWS], tl.float32)  # by token, and summed over them at last
        unit = tl.max(tl.sqrt(states * states + partner * partner), 0)[None, :]
        states, partner = states * reciprocal(unit), partner * reciprocal(unit)
        high, low = high_and_low(states)
        for column in range(first, tl.minimum(first + per_split, columns)):
            if PAGED:
                page = tl.load(blocks.table + b * blocks.table_stride + column).to(tl.int64)
                key_block = Block(blocks.addresses, 2, 0, page)
                start, begin, length = column, column * N, limit - column * N
            else:
                start, begin = b * columns + column, tl.load(blocks.begins + column)
                length = tl.minimum(tl.load(blocks.lengths + column), limit - begin)
                key_block = Block(blocks.addresses, field_stride, start)
            if ROTATE:
                angle = start * half + channel % half
                start_cos = tl.load(rope.start_cos + angle, channel >= 0, 0)[:, None]
                start_sin = tl.load(rope.start_sin + angle, channel >= 0, 0)[:, None]
                high, low = high_and_low(states * start_cos + partner * start_sin)
            scores = block_scores(
                key_block, key_codebook, offset, high, low, token, channel,
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
            fields = key_block.addresses + FIELDS * key_block.field_stride
            block_values = block_sums(
                Block(fields, key_block.field_stride, key_block.place, key_block.page), value_codebook,
                weights, token, value_channel, head, shape.kv_heads, D, DP, N, NP, VALUE,
            )  # fmt: skip
            sums = sums * shrink[None, :] + block_values
            totals = totals * shrink[None, :] + weights
        total, sums = tl.sum(totals, 0), sums / QUARTER

    rows = shape.group_heads * shape.queries
    to = (split.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * rows + row
    there = (row < rows)[None, :] & (value_channel >= 0)[:, None]
    store_split(sums_out, maxima_out, sums, maximum, total, to, row < rows, value_channel, there, D)

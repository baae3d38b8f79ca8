"""The decode kernel: attention of a few queries over packed blocks and exact rows, split over programs.

A program has a run of blocks of one sequence and key/value head, and up to ROWS of its query heads and
queries; the first of each has what is kept exactly: tail, sinks, the newest tokens. What a program found is
left to `join`.
"""

import triton
import triton.language as tl

from .exact import asked_rows, attend_exact, leave
from .products import block_scores, block_sums, over, split, to_halves
from .softmax import LOWEST, capped, masked, shares
from .unpack import SMALL, coded, lanes

FIELDS = tl.constexpr(6)  # of keys, then as many of values

VARYING = (
    "columns", "share", "limit", "past", "tail_count", "sink_count", "mask_batch", "mask_query"
)  # fmt: skip
"""What changes from step to step: nothing is compiled anew for it."""


@triton.jit(do_not_specialize=VARYING)
def attend(
    query,
    newest_key,
    newest_value,
    tail,
    sinks,
    sink_at,
    mask,
    sums_out,
    peaks_out,
    blocks,
    begins,
    lengths,
    start_cos,
    start_sin,
    turn_cos,
    turn_sin,
    tail_cos,
    tail_sin,
    sink_cos,
    sink_sin,
    key_levels,
    value_levels,
    offset,
    columns,
    share,
    limit,
    past,
    tail_count,
    sink_count,
    queries,
    group_heads,
    kv_heads,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    tail_batch,
    tail_token,
    sink_batch,
    sink_token,
    mask_batch,
    mask_query,
    mask_token,
    scaling,
    softcap,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
    TURN: tl.constexpr,
    OFFSET: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_TABLE: tl.constexpr,
    KEY_PER_TOKEN: tl.constexpr,
    KEY_SPAN: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_SPARSE: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_TABLE: tl.constexpr,
    VALUE_PER_TOKEN: tl.constexpr,
    VALUE_SPAN: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_SPARSE: tl.constexpr,
):
    """Grid: parts, batch times key/value heads, runs of ROWS.

    ``blocks``: addresses int64 ``[2 FIELDS, B, columns]``; ``begins`` and ``lengths`` int32 ``[columns]``;
    angles fp32 ``[B, ., D/2]``, but those of turns ``[N, D/2]``. Writes ``sums_out`` and ``peaks_out``
    as `join` takes them.
    """
    half: tl.constexpr = D // 2
    part = tl.program_id(0)
    b, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    channel = coded(D, DP, KEY_BITS, DP)
    other = tl.where(channel < half, channel + half, channel - half)
    value_channel = lanes(D, DP)
    token = coded(N, NP, VALUE_BITS, NP)

    row, query_place, own, whole, states, mask_row = asked_rows(
        query, b, head, tl.program_id(2), channel, queries, group_heads,
        query_batch, query_head, query_token, mask_batch, mask_query, scaling, ROWS,
    )  # fmt: skip
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([DP, ROWS], tl.float32)
    if part == 0:
        right, unit = to_halves(states)
        peak, total, sums = attend_exact(
            right, unit, newest_key, newest_value, tail, sinks, sink_at, mask,
            tail_cos, tail_sin, sink_cos, sink_sin, b, head,
            limit, past, tail_count, sink_count, queries, kv_heads,
            key_batch, key_head, key_token, value_batch, value_head, value_token,
            tail_batch, tail_token, sink_batch, sink_token, mask_row, mask_token,
            query_place, channel, other, value_channel, softcap, peak, total, sums,
            D, TURN, MASK, SOFTCAP,
        )  # fmt: skip
    else:
        partner, cos, sin = tl.zeros_like(states), 0.0, 0.0
        if TURN:
            partner = tl.load(own[None, :] + other[:, None], whole, 0).to(tl.float32) * scaling
            partner = tl.where((channel < half)[:, None], partner, -partner)
            # The first half of runs is that of the channels.
            pair = coded(D, DP, KEY_BITS, DP)
            pair = tl.min(tl.reshape(pair, (2, 2, DP // 4)), 1)
            pair = tl.reshape(pair, (DP // 2,))
            place = token[:, None] * half + pair[None, :]
            both = (token >= 0)[:, None] & (pair >= 0)[None, :]
            cos = tl.load(turn_cos + place, both, 0).to(tl.float16)
            sin = tl.load(turn_sin + place, both, 0).to(tl.float16)
        if SINKS:
            sink = tl.arange(0, SINKS)
            kept = tl.load(sink_at + b * sink_count + sink, sink < sink_count, -1)
        each = tl.num_programs(1) // kv_heads * columns
        totals = tl.zeros([NP, ROWS], tl.float32)  # by token, and summed over them at last
        unit = tl.max(tl.sqrt(states * states + partner * partner), 0)[None, :]
        states, partner = states * over(unit), partner * over(unit)
        right, rest = split(states)
        for column in range((part - 1) * share, tl.minimum(part * share, columns)):
            at, begin = b * columns + column, tl.load(begins + column)
            if TURN:
                angle = at * half + channel % half
                back = tl.load(start_cos + angle, channel >= 0, 0)[:, None]
                aside = tl.load(start_sin + angle, channel >= 0, 0)[:, None]
                right, rest = split(states * back + partner * aside)
            scores = block_scores(
                blocks, each, at, key_levels, offset, right, rest, token, channel, cos, sin, head,
                kv_heads, D, DP, N, NP, KEY_BITS, KEY_TABLE, KEY_PER_TOKEN, KEY_SPAN, KEY_GROUP, KEY_SPARSE,
                OFFSET, TURN,
            )  # fmt: skip
            scores *= unit / SMALL
            if SOFTCAP:
                scores = capped(scores, softcap)
            seen = (token >= 0) & (token < tl.minimum(tl.load(lengths + column), limit - begin))
            if SINKS:
                seen = seen & (tl.min(tl.abs(kept[:, None] - begin - token[None, :]), 0) > 0)
            scores = masked(
                scores, mask, (begin + token) * mask_token, mask_row, seen[:, None], MASK
            )
            weights, shrink, peak = shares(scores, peak)
            found = block_sums(
                blocks + FIELDS * each, each, at, value_levels, weights, token, value_channel, head,
                kv_heads, D, DP, N, NP, VALUE_BITS, VALUE_TABLE, VALUE_PER_TOKEN, VALUE_SPAN,
                VALUE_GROUP, VALUE_SPARSE,
            )  # fmt: skip
            sums = sums * shrink[None, :] + found
            totals = totals * shrink[None, :] + weights
        total, sums = tl.sum(totals, 0), sums / SMALL

    rows = group_heads * queries
    to = (part.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * rows + row
    whole = (row < rows)[None, :] & (value_channel >= 0)[:, None]
    leave(sums_out, peaks_out, sums, peak, total, to, row < rows, value_channel, whole, D)

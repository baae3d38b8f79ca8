"""The kernel that attends to what is kept exactly, where blocks are another kernel's."""

import triton
import triton.language as tl

from .exact import asked_rows, attend_exact, leave
from .products import to_halves
from .softmax import LOWEST

VARYING = ("past", "limit", "tail_count", "sink_count", "mask_batch", "mask_query")


@triton.jit(do_not_specialize=VARYING)
def exact(
    query,
    newest_key,
    newest_value,
    tail,
    sinks,
    sink_at,
    mask,
    sums_out,
    peaks_out,
    tail_cos,
    tail_sin,
    sink_cos,
    sink_sin,
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
    ROWS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid: batch times key/value heads, runs of ROWS. As the first part of `attend`."""
    half: tl.constexpr = D // 2
    b, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    channel = tl.arange(0, DP)
    channel = tl.where(channel < D, channel, -1)
    other = tl.where(channel < half, channel + half, channel - half)
    row, query_place, _, whole, states, mask_row = asked_rows(
        query, b, head, tl.program_id(1), channel, queries, group_heads,
        query_batch, query_head, query_token, mask_batch, mask_query, scaling, ROWS,
    )  # fmt: skip
    right, unit = to_halves(states)
    peak, total, sums = attend_exact(
        right, unit, newest_key, newest_value, tail, sinks, sink_at, mask,
        tail_cos, tail_sin, sink_cos, sink_sin, b, head,
        limit, past, tail_count, sink_count, queries, kv_heads,
        key_batch, key_head, key_token, value_batch, value_head, value_token,
        tail_batch, tail_token, sink_batch, sink_token, mask_row, mask_token,
        query_place, channel, other, channel, softcap,
        tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32),
        tl.zeros([DP, ROWS], tl.float32),
        D, True, MASK, SOFTCAP,
    )  # fmt: skip
    rows = group_heads * queries
    to = tl.program_id(0).to(tl.int64) * rows + row
    leave(sums_out, peaks_out, sums, peak, total, to, row < rows, channel, whole, D)

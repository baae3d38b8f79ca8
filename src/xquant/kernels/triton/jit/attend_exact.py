"""The kernel that attends over exact tokens, where other kernels read the blocks."""

import triton
import triton.language as tl

from .exact import Channels, add_exact, load_rows, queries_of, store_split
from .softmax import LOWEST, Mask, mask_rows

VARYING = ("limit", "new_runs", "tail_runs", "sink_runs", "mask_batch_stride", "mask_query_stride")
"""What changes from step to step: nothing is compiled anew for it."""


@triton.jit(do_not_specialize=VARYING)
def attend_exact(
    query,
    key,
    value,
    tail,
    sinks,
    mask,
    mask_batch_stride,
    mask_query_stride,
    mask_token_stride,
    sums_out,
    maxima_out,
    limit,
    new_runs,
    tail_runs,
    sink_runs,
    shape,
    scaling,
    softcap,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention over the exact tokens: tail, sinks and the newest. It is the first split of `attend`, with
    the same arguments; keys are kept before RoPE. The reference is what `blockwise.BlockwiseAttention` adds
    of exact tokens to its softmax.

    Grid: sequences times key/value heads, runs of ROWS rows.

    Args:
        sums_out: fp32 ``[B G, rows, D]``, to write.
        maxima_out: fp32 ``[B G, rows, 2]``, running maximum and total, to write.
    """
    half: tl.constexpr = D // 2
    b, head = tl.program_id(0) // shape.kv_heads, tl.program_id(0) % shape.kv_heads
    channel = tl.arange(0, DP)
    channel = tl.where(channel < D, channel, -1)
    partner_channel = tl.where(channel < half, channel + half, channel - half)
    row, place, _, there, states = load_rows(
        query, b, head, tl.program_id(1), channel, shape, scaling, ROWS
    )
    mask = Mask(mask, mask_batch_stride, mask_query_stride, mask_token_stride)
    mask_row = mask_rows(mask, b, place)
    maximum, total, sums = add_exact(
        queries_of(states, place), key, value, tail, sinks, mask, mask_row,
        b, head, limit, new_runs, tail_runs, sink_runs, shape,
        Channels(channel, partner_channel, channel), softcap,
        tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32),
        tl.zeros([DP, ROWS], tl.float32),
        D, True, False, MASK, SOFTCAP,
    )  # fmt: skip
    rows = shape.group_heads * shape.queries
    to = tl.program_id(0).to(tl.int64) * rows + row
    store_split(sums_out, maxima_out, sums, maximum, total, to, row < rows, channel, there, D)

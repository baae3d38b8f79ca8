"""The kernel that combines what the programs of `attend` found."""

import triton
import triton.language as tl

from .softmax import LOWEST

STEP = tl.constexpr(16)


@triton.jit(do_not_specialize=("parts",))
def combine(
    sums,
    peaks,
    out,
    parts,
    queries,
    group_heads,
    kv_heads,
    out_batch,
    out_token,
    out_head,
    peaks_out,
    D: tl.constexpr,
    DP: tl.constexpr,
    OPEN: tl.constexpr,
):
    """Grid: rows, batch times key/value heads, runs of DP channels.

    ``sums`` fp32 ``[parts, B G, rows, D]`` and ``peaks`` ``[parts, B G, rows, 2]``, the peak and the total.
    Writes ``out`` ``[B, t, H, D]`` by its strides. Where ``OPEN`` it is a part of something more:
    ``peaks_out`` ``[B G, rows, 2]`` are its peak and total, as of sums that need no division.
    """
    row, rows, many = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * DP + tl.arange(0, DP)
    highest = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    joined = tl.zeros([DP], tl.float32)
    for first in range(0, parts, STEP):
        part = first + tl.arange(0, STEP)
        at = (part * tl.num_programs(1) + many) * rows + row
        peak = tl.load(peaks + at * 2, part < parts, LOWEST)
        raised = tl.maximum(highest, tl.max(peak, 0))
        shrink, grow = tl.exp(highest - raised), tl.exp(peak - raised)
        highest = raised
        total = total * shrink + tl.sum(grow * tl.load(peaks + at * 2 + 1, part < parts, 0), 0)
        there = (part < parts)[:, None] & (channel < D)[None, :]
        found = tl.load(sums + at[:, None] * D + channel[None, :], there, 0)
        joined = joined * shrink + tl.sum(grow[:, None] * found, 0)
    some = tl.where(total > 0, total, 1)
    joined = tl.where(total > 0, joined / some, 0)
    if OPEN:
        one = tl.arange(0, 1)
        to = peaks_out + (many * rows + row) * 2 + one
        tl.store(to, highest + tl.log(some))
        tl.store(to + 1, (total > 0).to(tl.float32))
    b, head = many // kv_heads, many % kv_heads * group_heads + row // queries
    to = out + b * out_batch + row % queries * out_token + head * out_head
    tl.store(to + channel, joined.to(out.dtype.element_ty), channel < D)

"""The kernel that joins what the programs of `attend` found."""

import triton
import triton.language as tl

from .softmax import LOWEST

STEP = tl.constexpr(16)


@triton.jit(do_not_specialize=("parts",))
def join(
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
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Grid: rows, batch times key/value heads. Writes ``out`` ``[B, t, H, D]`` by its strides."""
    row, rows, many = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, DP)
    highest = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    joined = tl.zeros([DP], tl.float32)
    for first in range(0, parts, STEP):
        part = first + tl.arange(0, STEP)
        at = (many * parts + part) * rows + row
        peak = tl.load(peaks + at * 2, part < parts, LOWEST)
        raised = tl.maximum(highest, tl.max(peak, 0))
        shrink, grow = tl.exp(highest - raised), tl.exp(peak - raised)
        highest = raised
        total = total * shrink + tl.sum(grow * tl.load(peaks + at * 2 + 1, part < parts, 0), 0)
        there = (part < parts)[:, None] & (channel < D)[None, :]
        found = tl.load(sums + at[:, None] * D + channel[None, :], there, 0)
        joined = joined * shrink + tl.sum(grow[:, None] * found, 0)
    joined = tl.where(total > 0, joined / tl.where(total > 0, total, 1), 0)
    b, head = many // kv_heads, many % kv_heads * group_heads + row // queries
    to = out + b * out_batch + row % queries * out_token + head * out_head
    tl.store(to + channel, joined.to(out.dtype.element_ty), channel < D)

"""The kernel that combines splits of one softmax."""

import triton
import triton.language as tl

from .softmax import LOWEST, blocks_of_split

STEP = tl.constexpr(16)  # splits that are read at a time


@triton.jit(do_not_specialize=("splits",))
def combine(
    sums, maxima, out, maxima_out, sink_logits, splits, runs, shape,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of every row. Of a split ``i`` with running maximum ``m_i``, total ``l_i`` and sums
    ``o_i``::

        m   = max m_i
        l   = sum exp(m_i - m) l_i
        out = sum exp(m_i - m) o_i / l

    and 0 where no token was seen. A sink logit ``s`` adds ``exp(s - m)`` to ``l``.

    The reference is `blockwise.OnlineSoftmax.combine` over all splits, and the division after it.

    Grid: rows of a key/value head, sequences times key/value heads, runs of DP channels.

    Args:
        sums: fp32 ``[splits, B G, rows, D]``, ``o_i``.
        maxima: fp32 ``[splits, B G, rows, 2]``, ``m_i`` and ``l_i``.
        out: `Heads` ``[B, H, t, D]``, to write; of an engine's sequences ``[T, H, 1, D]``.
        maxima_out: fp32 ``[B G, rows, 2]``, to write where ``PARTIAL``. The result is then itself a split
            of a longer softmax, already divided: its maximum is ``m + log(l)`` and its total 1.
        sink_logits: fp32 ``[H]``, or None.
        runs: `Runs` of an engine's sequences, with blocks of ``N`` tokens. A sequence has splits for its own
            blocks; nothing was written of the others. None for a cache.
        shape: `Shape`.
    """
    row, rows, head_of_all = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * DP + tl.arange(0, DP)
    own, b = head_of_all // shape.kv_heads, head_of_all // shape.kv_heads
    if N is not None:
        own = tl.load(runs.new + b * 4).to(tl.int64)
        columns = tl.cdiv(tl.load(runs.limits + b), N)
        splits = 1 + tl.cdiv(columns, blocks_of_split(columns, splits))
    maximum = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    combined = tl.zeros([DP], tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        at = (split * tl.num_programs(1) + head_of_all) * rows + row
        split_maximum = tl.load(maxima + at * 2, split < splits, LOWEST)
        raised = tl.maximum(maximum, tl.max(split_maximum, 0))
        shrink, grow = tl.exp(maximum - raised), tl.exp(split_maximum - raised)
        maximum = raised
        split_total = tl.load(maxima + at * 2 + 1, split < splits, 0)
        total = total * shrink + tl.sum(grow * split_total, 0)
        there = (split < splits)[:, None] & (channel < D)[None, :]
        split_sums = tl.load(sums + at[:, None] * D + channel[None, :], there, 0)
        combined = combined * shrink + tl.sum(grow[:, None] * split_sums, 0)
    head = head_of_all % shape.kv_heads * shape.group_heads + row // shape.queries
    if sink_logits is not None:
        total = tl.where(total > 0, total + tl.exp(tl.load(sink_logits + head) - maximum), total)
    divisor = tl.where(total > 0, total, 1)
    combined = tl.where(total > 0, combined / divisor, 0)
    if PARTIAL:
        to = maxima_out + (head_of_all * rows + row) * 2 + tl.arange(0, 1)
        tl.store(to, maximum + tl.log(divisor))
        tl.store(to + 1, (total > 0).to(tl.float32))
    to = out.data + own * out.batch_stride + row % shape.queries * out.token_stride
    to += head * out.head_stride
    tl.store(to + channel, combined.to(out.data.dtype.element_ty), channel < D)

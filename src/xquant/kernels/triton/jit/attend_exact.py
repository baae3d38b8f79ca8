"""The kernel that attends over exact tokens, where other kernels read the blocks."""

import triton
import triton.language as tl

from ..arguments import Call, Memory
from .exact import Channels, add_exact, load_rows, store_split
from .softmax import Mask, empty_softmax, mask_rows

VARYING = ("limit", "tail_count", "sink_count", "mask_batch_stride", "mask_query_stride")
"""What changes from step to step: nothing is compiled anew for it."""


@triton.jit(do_not_specialize=VARYING)
def attend_exact(
    call, mask_batch_stride, mask_query_stride, memory, limit, tail_count, sink_count, sums_out, maxima_out,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention over the exact tokens: tail, sinks and the newest. It is the first split of `attend`, with
    the same arguments; keys are kept before RoPE. The reference is what `blockwise.BlockwiseAttention` adds
    of exact tokens to its softmax.

    Grid: sequences times key/value heads, runs of ROWS rows.

    Args:
        sums_out: fp32 ``[B G, rows, D]``, to write.
        maxima_out: fp32 ``[B G, rows, 2]``, running maximum and total, to write.
    """
    half: tl.constexpr = D // 2
    call, memory = Call(*call), Memory(*memory)  # see `arguments`
    shape = call.shape
    b, head = tl.program_id(0) // shape.kv_heads, tl.program_id(0) % shape.kv_heads
    channel = tl.arange(0, DP)
    channel = tl.where(channel < D, channel, -1)
    partner = tl.where(channel < half, channel + half, channel - half)
    rows = load_rows(call, b, head, tl.program_id(1), channel, ROWS)
    mask_row = mask_rows(mask_batch_stride, mask_query_stride, b, rows.place)
    softmax = add_exact(
        call, Mask(call.mask, call.mask_token_stride, mask_row), memory, rows, b, head,
        limit, tail_count, sink_count, Channels(channel, partner, channel), empty_softmax(ROWS, DP),
        D, True, True, False, MASK, SOFTCAP,
    )  # fmt: skip
    count = shape.group_heads * shape.queries
    to = tl.program_id(0).to(tl.int64) * count + rows.number
    store_split(sums_out, maxima_out, softmax, to, rows.number < count, channel, D)

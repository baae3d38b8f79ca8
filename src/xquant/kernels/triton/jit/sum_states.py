"""The kernel that sums what values come from by weights: the product with their projection is taken after it,
once for all tokens."""

import triton
import triton.language as tl

from .products import block_sums
from .softmax import LOWEST, shares
from .unpack import SMALL, coded, decoded, field, lanes, numbers, pairs

ROWS_IN = tl.constexpr(0)  # nothing is packed
CHANNELS = tl.constexpr(1)  # codes whose lanes are channels
TOKENS = tl.constexpr(2)  # or tokens


@triton.jit(do_not_specialize=("columns", "share", "rows"))
def sum_states(
    scores,
    sums_out,
    peaks_out,
    blocks,
    rows_in,
    begins,
    lengths,
    columns,
    share,
    rows,
    C,
    row_batch,
    row_token,
    sequences,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SOURCE: tl.constexpr,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: parts, runs of D channels, sequences times runs of ROWS rows.

    ``scores`` fp32 ``[B, rows, columns N]``, -inf for what is not seen. Writes ``sums_out`` and
    ``peaks_out`` as `join` takes them, of one head of ``C`` channels.
    """
    part, run = tl.program_id(0), tl.program_id(1)
    b, first = tl.program_id(2) % sequences, tl.program_id(2) // sequences * ROWS
    each = sequences * columns
    row = first + tl.arange(0, ROWS)
    token, channel = lanes(N, NP), lanes(D, DP)
    if SOURCE == CHANNELS:
        token = coded(N, NP, BITS, NP)
    if SOURCE == TOKENS:
        channel = coded(D, DP, BITS, DP)
    here = channel >= 0
    if SOURCE == ROWS_IN:
        here = here & (run * D + channel < C)

    own = scores + (b.to(tl.int64) * rows + row) * (columns * N)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    totals = tl.zeros([NP, ROWS], tl.float32)  # by token, and summed over them at last
    sums = tl.zeros([DP, ROWS], tl.float32)
    for column in range(part * share, tl.minimum((part + 1) * share, columns)):
        at = b * columns + column
        whole = (row < rows)[None, :] & (token >= 0)[:, None]
        found = tl.load(own[None, :] + (column * N + token)[:, None], whole, float("-inf"))
        weights, shrink, peak = shares(found, peak)
        totals = totals * shrink[None, :] + weights
        sums *= shrink[None, :]
        if SOURCE == CHANNELS:
            sums += block_sums(
                blocks, each, at, None, weights, token, channel, run,
                C // D, D, DP, N, NP, BITS, False, True, SPAN, GROUP, 0,
            ) / SMALL  # fmt: skip
        elif SOURCE == TOKENS:
            words = field(blocks, 0, each, at, tl.int32) + run * (D * N * BITS // 32)
            states = numbers(pairs(words, token, D, DP, BITS, NP), None, BITS, False, NP, DP)
            states = decoded(
                blocks, each, at, states, token, channel, run * D,
                D, N, C, BITS, False, True, SPAN, GROUP, 0, True, NP, DP,
            )  # fmt: skip
            sums += tl.dot(tl.trans(states), weights.to(tl.float16)) / SMALL
        else:
            tokens = (tl.load(begins + column) + token).to(tl.int64)
            there = (token >= 0) & (token < tl.load(lengths + column))
            states = rows_in + b.to(tl.int64) * row_batch + tokens[None, :] * row_token
            states = tl.load(
                states + (run * D + channel)[:, None], there[None, :] & here[:, None], 0
            )
            if states.dtype == tl.float32:
                sums += tl.dot(states, weights, input_precision="ieee")
            else:
                sums += tl.dot(states, weights.to(states.dtype))
    to = (part.to(tl.int64) * sequences + b) * rows + row
    if run == 0:
        tl.store(peaks_out + to * 2, peak, row < rows)
        tl.store(peaks_out + to * 2 + 1, tl.sum(totals, 0), row < rows)
    to = to[None, :] * C + (run * D + channel)[:, None]
    tl.store(sums_out + to, sums, (row < rows)[None, :] & here[:, None])

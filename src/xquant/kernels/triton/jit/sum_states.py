"""The kernel that sums the rows that values come from, by the weights of the softmax."""

import triton
import triton.language as tl

from .codes import LEVEL, QUARTER, block_at, lane_order, load_words, pointer, tile_order, unpacked
from .halves import as_halves
from .products import block_sums, value_words
from .softmax import LOWEST, softmax_weights
from .unpack import decode

PLAIN = tl.constexpr(0)  # rows that are not packed
CHANNEL_LANES = tl.constexpr(1)  # packed rows whose lanes are channels
TOKEN_LANES = tl.constexpr(2)  # or tokens


@triton.jit(do_not_specialize=("columns", "blocks_per_split", "rows"))
def sum_states(
    scores, sums_out, maxima_out, blocks, rows_in, columns, blocks_per_split, rows, C, sequences,
    N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SOURCE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Sum rows ``x`` by the softmax of scores ``s``, ``sum_t softmax(s)_t x_t``, by an online softmax
    (`softmax`) that is split over programs.

    ``sum_t w_t (W x_t) = W sum_t w_t x_t``, so the value projection ``W`` is applied once to the sums, which
    `combine` makes of the splits. The reference is `rebuilding.RebuildingAttention`, from which it differs by
    roundings to fp16.

    Grid: splits, runs of D channels, sequences times runs of ROWS rows; rows are query heads times queries.

    Args:
        scores: fp32 ``[B, rows, columns N]``, -inf for what is not seen.
        sums_out: fp32 ``[splits, B, rows, C]``, to write.
        maxima_out: fp32 ``[splits, B, rows, 2]``, to write.
        blocks: `Blocks`, with the FIELDS of the packed rows.
        rows_in: `Rows` ``[B, T, C]``, where ``SOURCE`` is PLAIN.
        D: channels of a program, ``DP`` as a power of two: those of a tile where lanes are tokens.
        SOURCE: PLAIN, CHANNEL_LANES or TOKEN_LANES.
        LAYOUT: `operand.Layout` of the packed rows.
    """
    split, run = tl.program_id(0), tl.program_id(1)
    b, first = tl.program_id(2) % sequences, tl.program_id(2) // sequences * ROWS
    row = first + tl.arange(0, ROWS)
    token, channel = lane_order(N, NP), lane_order(D, DP)
    if SOURCE == CHANNEL_LANES:
        token = tile_order(N, NP, LAYOUT.bits, NP)
    if SOURCE == TOKEN_LANES:
        channel = tile_order(D, DP, LAYOUT.bits, DP)
    here = channel >= 0
    if SOURCE == PLAIN:
        here = here & (run * D + channel < C)

    row_scores = scores + (b.to(tl.int64) * rows + row) * (columns * N)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    totals = tl.zeros([NP, ROWS], tl.float32)  # by token, and summed over them at last
    sums = tl.zeros([DP, ROWS], tl.float32)
    start = split * blocks_per_split
    for column in range(start, tl.minimum((split + 1) * blocks_per_split, columns)):
        block = block_at(blocks.addresses + b * columns + column, sequences * columns)
        there = (row < rows)[None, :] & (token >= 0)[:, None]
        place = (column * N + token)[:, None]
        block_scores = tl.load(row_scores[None, :] + place, there, float("-inf"))
        weights, shrink, maximum = softmax_weights(block_scores, maximum)
        totals = totals * shrink[None, :] + weights
        sums *= shrink[None, :]
        if SOURCE == CHANNEL_LANES:
            words = value_words(block, channel, run, D, N, NP, LAYOUT.bits)
            sums = block_sums(
                sums, block, words, None, weights.to(tl.float16),
                token, channel, run, C // D, D, DP, N, NP, LAYOUT,
            )  # fmt: skip
        elif SOURCE == TOKEN_LANES:
            words = pointer(block.codes, tl.int32) + run * (D * N * LAYOUT.bits // 32)
            level = unpacked(load_words(words, token, D, DP, LAYOUT.bits), LAYOUT.bits, LEVEL)
            states = decode(block, level, token, channel, run * D, D, N, C, LAYOUT, True, NP, DP)
            states = tl.trans(as_halves(states, NP, DP))
            sums = tl.dot(states, weights.to(tl.float16), sums)
        else:
            tokens = (tl.load(blocks.begins + column) + token).to(tl.int64)
            here_too = (token >= 0) & (token < tl.load(blocks.lengths + column))
            states = rows_in.data + b.to(tl.int64) * rows_in.batch_stride
            states = states + tokens[None, :] * rows_in.token_stride
            states = tl.load(states + (run * D + channel)[:, None], here_too[None, :] & here[:, None], 0)
            if states.dtype == tl.float32:
                sums += tl.dot(states, weights, input_precision="ieee")
            else:
                sums += tl.dot(states, weights.to(states.dtype))
    if SOURCE != PLAIN:
        sums /= QUARTER
    to = (split.to(tl.int64) * sequences + b) * rows + row
    if run == 0:
        tl.store(maxima_out + to * 2, maximum, row < rows)
        tl.store(maxima_out + to * 2 + 1, tl.sum(totals, 0), row < rows)
    to = to[None, :] * C + (run * D + channel)[:, None]
    tl.store(sums_out + to, sums, (row < rows)[None, :] & here[:, None])

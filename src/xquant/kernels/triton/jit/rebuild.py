"""The kernel that rebuilds keys from the rows that are kept in their place, and scores them (arXiv
2508.10395)."""

import triton
import triton.language as tl

from ..arguments import Call, Memory
from .codes import QUARTER, block_at, lane_order
from .exact import row_pointers
from .products import HALF_MAX, divided, high_and_low
from .softmax import Mask, mask_rows, seen_scores
from .states import packed_chunk, row_chunk

VARYING = ("columns", "limit", "sink_count", "mask_batch_stride", "mask_query_stride")
"""What changes from step to step: nothing is compiled anew for it."""


@triton.jit
def head_channels(D: tl.constexpr, COUNT: tl.constexpr, DP: tl.constexpr):
    """The channels of heads that follow each other, in ``COUNT`` places. The halves of a head follow each
    other too, each with a hole of -1 at its end where it is no power of two."""
    half: tl.constexpr = D // 2
    place = tl.arange(0, COUNT)
    within = place % (DP // 2)
    return tl.where(within < half, place // DP * D + place % DP // (DP // 2) * half + within, -1)


@triton.jit
def finished_keys(
    product, head, token, weights, rope,
    D: tl.constexpr, DP: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A quarter of the keys of a head, ``R(r) norm(product + bias)``, as of `high_and_low`.

    ``product``: of the states of a block with the head's rows of the matrix, fp32 ``[NP, DP]``; the rest as
    in `rebuild`.
    """
    half: tl.constexpr = D // 2
    NP: tl.constexpr = token.shape[0]
    HP: tl.constexpr = DP // 2
    channel = head_channels(D, DP, DP)
    here = channel >= 0
    keys = product * tl.load(weights.matrix.units + head * D + channel, here, 0)[None, :]
    if PACKED:
        keys /= QUARTER
    if BIAS:
        keys += tl.load(weights.bias + head * D + channel, here, 0)[None, :]
    if NORM:
        keys *= tl.rsqrt(tl.sum(keys * keys, 1) / D + weights.epsilon)[:, None]
        keys *= tl.load(weights.gain + channel, here, 0)[None, :]
    pair = tl.arange(0, HP)
    angle = token[:, None] * half + pair[None, :]
    both = (token >= 0)[:, None] & (pair < half)[None, :]
    cos, sin = tl.load(rope.within_cos + angle, both, 0), tl.load(rope.within_sin + angle, both, 0)
    first_half, second_half = tl.split(tl.permute(tl.reshape(keys, (NP, 2, HP)), (0, 2, 1)))
    keys = tl.join(first_half * cos - second_half * sin, second_half * cos + first_half * sin)
    keys = tl.reshape(tl.permute(keys, (0, 2, 1)), (NP, DP)) * QUARTER
    return high_and_low(tl.minimum(tl.maximum(keys, -HALF_MAX), HALF_MAX))


@triton.jit
def store_scores(
    scores_out, high, low, head, call, mask_batch_stride, mask_query_stride, rope, b, column, columns, begin,
    token, seen,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write the scores ``R(-p) q . k`` of all rows of a head with the keys of a block, -inf of each ``token``
    ``[NP]`` that is not ``seen``.

    ``high`` and ``low``: the keys, as of `finished_keys`; ``begin``: the first token; the rest as in
    `rebuild`.
    """
    half: tl.constexpr = D // 2
    shape, channel = call.shape, head_channels(D, DP, DP)
    here = channel >= 0
    angle = (b * columns + column) * half + channel % half
    cos = tl.load(rope.start_cos + angle, here, 0)
    sin = tl.load(rope.start_sin + angle, here, 0)
    partner_channel = tl.where(channel < half, channel + half, channel - half)
    sin = tl.where(channel < half, sin, -sin)
    rows = shape.group_heads * shape.queries
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        place, pointer = row_pointers(call.query, b, head, row, shape)
        there = (row < rows)[None, :] & here[:, None]
        states = tl.load(pointer[None, :] + channel[:, None], there, 0).to(tl.float32)
        states *= cos[:, None]
        partner = tl.load(pointer[None, :] + partner_channel[:, None], there, 0).to(tl.float32)
        states, unit = divided((states + partner * sin[:, None]) * call.scaling)
        query_high, query_low = high_and_low(states)
        # All that keys and queries are is in the product, but for what two roundings leave of them.
        scores = tl.dot(low, query_high)
        scores = tl.dot(high, query_high, tl.dot(high, query_low, scores)) * (unit / QUARTER)
        mask_row = mask_rows(mask_batch_stride, mask_query_stride, b, place)
        mask = Mask(call.mask, call.mask_token_stride, mask_row)
        scores = seen_scores(scores, call.softcap, mask, begin + token, seen[:, None], MASK, SOFTCAP)
        to = (b * shape.kv_heads + head).to(tl.int64) * rows + row
        to = to * (columns * N) + column * N
        there = (row < rows)[None, :] & (token >= 0)[:, None]
        tl.store(scores_out + to[None, :] + token[:, None], scores, there)


@triton.jit(do_not_specialize=VARYING)
def rebuild(
    call, mask_batch_stride, mask_query_stride, memory, columns, limit, sink_count, rows_in, weights, C,
    scores_out,
    D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr,
    LAYOUT: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, SINKS: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write the scores of queries ``q`` with keys that are rebuilt from rows ``x``. At place ``r`` of a
    block that starts at position ``p``::

        k     = norm(W x + bias)
        score = scaling R(-p) q . R(r) k

    A norm (Qwen3, Gemma 3) is ``k / sqrt(mean(k^2) + epsilon) * gain``. Rows are decoded once for HEADS
    key/value heads, 1 or 2, and keys are forgotten after their product. `sum_states` reads the scores. The
    reference is `torch.rebuild.DecodedAttention`, from which they differ by roundings to fp16.

    Grid: columns of blocks, runs of HEADS key/value heads, sequences.

    Args:
        call: `Call`, the strides of whose mask change from step to step.
        memory: `Memory` of a cache, with the FIELDS of the packed rows, where ``PACKED``. Sinks are seen as
            exact tokens, and not here.
        columns: blocks of each sequence.
        limit: tokens that are read from blocks.
        rows_in: `Rows` ``[B, T, C]``, sums over layers, where not ``PACKED``.
        weights: `KeyWeights`, whose bias is there where ``BIAS``, whose gain where ``NORM``.
        scores_out: fp32 ``[B, G, rows, columns N]``, to write; -inf for what a row does not see.
        CHUNK: channels that are multiplied at a time, ``CHUNKS`` times.
        TILE: channels of a tile of the packed rows, whose ``LAYOUT`` is an `operand.Layout`.
        SINKS: a power of two from ``sink_count`` on, 0 where there are none.
    """
    column, head, b = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    call, memory = Call(*call), Memory(*memory)  # see `arguments`
    blocks, matrix = memory.blocks, weights.matrix
    block = block_at(blocks.addresses + b * columns + column, tl.num_programs(2) * columns)
    begin, length = tl.load(blocks.begins + column), tl.load(blocks.lengths + column)
    token, channel = lane_order(N, NP), head_channels(D, HEADS * DP, DP)
    row = matrix.data + (head * D + channel)[None, :] * (CHUNKS * CHUNK)
    product = tl.zeros([NP, HEADS * DP], tl.float32)
    for chunk in range(CHUNKS):
        if PACKED:
            states = packed_chunk(block, chunk, token, C, N, NP, TILE, CHUNK, LAYOUT)
        else:
            rows = rows_in.data + b.to(tl.int64) * rows_in.batch_stride
            states = row_chunk(
                rows, rows_in.token_stride, begin, length, chunk, token, C, CHUNK,
                matrix.data.dtype.element_ty,
            )  # fmt: skip
        at = row + (chunk * CHUNK + tl.arange(0, CHUNK))[:, None]
        product = tl.dot(states, tl.load(at, (channel >= 0)[None, :], 0), product)
    seen = (token >= 0) & (token < tl.minimum(length, limit - begin))
    if SINKS:
        sink = tl.arange(0, SINKS)
        sink_column = tl.load(memory.sinks.columns + b * sink_count + sink, sink < sink_count, -1)
        seen = seen & (tl.min(tl.abs(sink_column[:, None] - begin - token[None, :]), 0) > 0)
    if HEADS == 1:
        products = (product,)
    else:
        products = tl.split(tl.permute(tl.reshape(product, (NP, 2, DP)), (0, 2, 1)))
    for i in tl.static_range(HEADS):
        high, low = finished_keys(
            products[i], head + i, token, weights, memory.rope, D, DP, PACKED, BIAS, NORM
        )
        store_scores(
            scores_out, high, low, head + i, call, mask_batch_stride, mask_query_stride, memory.rope,
            b, column, columns, begin, token, seen, D, DP, N, ROWS, MASK, SOFTCAP,
        )  # fmt: skip

"""The kernel that rebuilds keys from what is kept instead of them, and scores them (arXiv 2508.10395)."""

import triton
import triton.language as tl

from .products import HALF_MAX, over, split
from .softmax import capped, masked
from .states import coded_chunk, row_chunk
from .unpack import SMALL, lanes

VARYING = ("columns", "limit", "sink_count", "mask_batch", "mask_query")
"""What changes from step to step: nothing is compiled anew for it."""


@triton.jit
def places(D: tl.constexpr, COUNT: tl.constexpr, DP: tl.constexpr):
    """Channels of heads that follow each other, in ``COUNT`` places: halves of a head follow each other too,
    each with a hole at its end where it is no power of two, -1."""
    half: tl.constexpr = D // 2
    place = tl.arange(0, COUNT)
    within = place % (DP // 2)
    return tl.where(within < half, place // DP * D + place % DP // (DP // 2) * half + within, -1)


@triton.jit
def score(
    keys,
    head,
    b,
    at,
    column,
    token,
    begin,
    length,
    query,
    sink_at,
    mask,
    scores_out,
    units,
    bias,
    gain,
    start_cos,
    start_sin,
    turn_cos,
    turn_sin,
    columns,
    limit,
    sink_count,
    queries,
    group_heads,
    kv_heads,
    query_batch,
    query_head,
    query_token,
    mask_batch,
    mask_query,
    mask_token,
    scaling,
    softcap,
    epsilon,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    CODED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The scores of all rows with products ``keys`` ``[NP, DP]`` of a head, which become keys."""
    half: tl.constexpr = D // 2
    HP: tl.constexpr = DP // 2
    channel = places(D, DP, DP)
    here = channel >= 0
    keys *= tl.load(units + head * D + channel, here, 0)[None, :]
    if CODED:
        keys /= SMALL
    if BIAS:
        keys += tl.load(bias + head * D + channel, here, 0)[None, :]
    if NORM:
        keys *= tl.rsqrt(tl.sum(keys * keys, 1) / D + epsilon)[:, None]
        keys *= tl.load(gain + channel, here, 0)[None, :]
    h = tl.arange(0, HP)
    angle = token[:, None] * half + h[None, :]
    both = (token >= 0)[:, None] & (h < half)[None, :]
    cos, sin = tl.load(turn_cos + angle, both, 0), tl.load(turn_sin + angle, both, 0)
    first_half, second_half = tl.split(tl.permute(tl.reshape(keys, (NP, 2, HP)), (0, 2, 1)))
    keys = tl.join(first_half * cos - second_half * sin, second_half * cos + first_half * sin)
    keys = tl.reshape(tl.permute(keys, (0, 2, 1)), (NP, DP)) * SMALL
    high, low = split(tl.minimum(tl.maximum(keys, -HALF_MAX), HALF_MAX))

    seen = (token >= 0) & (token < tl.minimum(length, limit - begin))
    if SINKS:
        sink = tl.arange(0, SINKS)
        kept = tl.load(sink_at + b * sink_count + sink, sink < sink_count, -1)
        seen = seen & (tl.min(tl.abs(kept[:, None] - begin - token[None, :]), 0) > 0)
    angle = at * half + channel % half
    back, aside = tl.load(start_cos + angle, here, 0), tl.load(start_sin + angle, here, 0)
    other = tl.where(channel < half, channel + half, channel - half)
    aside = tl.where(channel < half, aside, -aside)
    rows = group_heads * queries
    for first in range(0, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        own = query + b.to(tl.int64) * query_batch + (r % queries) * query_token
        own += (head * group_heads + r // queries) * query_head
        whole = (r < rows)[None, :] & here[:, None]
        right = tl.load(own[None, :] + channel[:, None], whole, 0).to(tl.float32) * back[:, None]
        partner = tl.load(own[None, :] + other[:, None], whole, 0).to(tl.float32)
        right = (right + partner * aside[:, None]) * scaling
        unit = tl.max(tl.abs(right), 0)[None, :]
        great, little = split(right * over(unit))
        # All that keys and queries are is in the product, but for what two roundings leave of them.
        scores = tl.dot(high, great, tl.dot(high, little, tl.dot(low, great))) * (unit / SMALL)
        if SOFTCAP:
            scores = capped(scores, softcap)
        mask_row = b.to(tl.int64) * mask_batch + (r % queries) * mask_query
        scores = masked(scores, mask, (begin + token) * mask_token, mask_row, seen[:, None], MASK)
        to = ((b * kv_heads + head).to(tl.int64) * rows + r) * (columns * N) + column * N
        there = (r < rows)[None, :] & (token >= 0)[:, None]
        tl.store(scores_out + to[None, :] + token[:, None], scores, there)


@triton.jit(do_not_specialize=VARYING)
def rebuild(
    query,
    sink_at,
    mask,
    scores_out,
    blocks,
    rows_in,
    begins,
    lengths,
    weights,
    units,
    bias,
    gain,
    start_cos,
    start_sin,
    turn_cos,
    turn_sin,
    columns,
    limit,
    sink_count,
    queries,
    group_heads,
    kv_heads,
    C,
    query_batch,
    query_head,
    query_token,
    row_batch,
    row_token,
    mask_batch,
    mask_query,
    mask_token,
    scaling,
    softcap,
    epsilon,
    D: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CODED: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid: columns of blocks, runs of HEADS key/value heads, sequences. A program rebuilds the keys of its
    heads of a block: codes are decoded once for them.

    ``weights`` ``[G D, CHUNKS CHUNK]`` and ``units`` fp32 ``[G D]``: `matrices.arranged`; ``rows_in``
    ``[B, T, C]`` where not ``CODED``; ``gain`` fp32 ``[D]`` and ``epsilon`` of a ``NORM`` of keys. Writes
    ``scores_out`` fp32 ``[B, G, rows, columns N]``, -inf for what a row does not see.
    """
    column, head, b = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    at, each = b * columns + column, tl.num_programs(2) * columns
    begin, length = tl.load(begins + column), tl.load(lengths + column)
    token, channel = lanes(N, NP), places(D, HEADS * DP, DP)
    here = channel >= 0
    row = weights + (head * D + channel)[None, :] * (CHUNKS * CHUNK)
    keys = tl.zeros([NP, HEADS * DP], tl.float32)
    for chunk in range(CHUNKS):
        if CODED:
            states = coded_chunk(
                blocks, each, at, chunk, token, C,
                N, NP, TILE, CHUNK, BITS, PER_TOKEN, SPAN, GROUP,
            )  # fmt: skip
        else:
            own = rows_in + b.to(tl.int64) * row_batch
            states = row_chunk(
                own, row_token, begin, length, chunk, token, C, CHUNK, weights.dtype.element_ty
            )
        matrix = tl.load(row + (chunk * CHUNK + tl.arange(0, CHUNK))[:, None], here[None, :], 0)
        keys = tl.dot(states, matrix, keys)
    if HEADS == 1:
        score(
            keys, head, b, at, column, token, begin, length, query, sink_at, mask, scores_out, units,
            bias, gain, start_cos, start_sin, turn_cos, turn_sin, columns, limit, sink_count,
            queries, group_heads, kv_heads, query_batch, query_head, query_token,
            mask_batch, mask_query, mask_token, scaling, softcap, epsilon,
            D, DP, N, NP, ROWS, CODED, BIAS, NORM, SINKS, MASK, SOFTCAP,
        )  # fmt: skip
    else:
        one, other = tl.split(tl.permute(tl.reshape(keys, (NP, 2, DP)), (0, 2, 1)))
        score(
            one, head, b, at, column, token, begin, length, query, sink_at, mask, scores_out, units,
            bias, gain, start_cos, start_sin, turn_cos, turn_sin, columns, limit, sink_count,
            queries, group_heads, kv_heads, query_batch, query_head, query_token,
            mask_batch, mask_query, mask_token, scaling, softcap, epsilon,
            D, DP, N, NP, ROWS, CODED, BIAS, NORM, SINKS, MASK, SOFTCAP,
        )  # fmt: skip
        score(
            other, head + 1, b, at, column, token, begin, length, query, sink_at, mask, scores_out, units,
            bias, gain, start_cos, start_sin, turn_cos, turn_sin, columns, limit, sink_count,
            queries, group_heads, kv_heads, query_batch, query_head, query_token,
            mask_batch, mask_query, mask_token, scaling, softcap, epsilon,
            D, DP, N, NP, ROWS, CODED, BIAS, NORM, SINKS, MASK, SOFTCAP,
        )  # fmt: skip

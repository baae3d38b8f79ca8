"""Attention over tokens that are kept as they are, inside a Triton kernel."""

import triton
import triton.language as tl

from .products import small
from .softmax import NONE, capped, masked, weigh
from .unpack import SMALL

STEP = tl.constexpr(32)


@triton.jit
def asked_rows(
    query,
    b,
    head,
    run,
    channel,
    queries,
    group_heads,
    query_batch,
    query_head,
    query_token,
    mask_batch,
    mask_query,
    scaling,
    ROWS: tl.constexpr,
):
    """A run of ROWS query heads times queries of a key/value head: which ``[R]``, which query each is, where
    they lie, those that are there with ``channel`` ``[K]`` as ``[K, R]``, what they are, scaled, fp32
    ``[K, R]``, and where their masks begin."""
    row, rows = run * ROWS + tl.arange(0, ROWS), group_heads * queries
    place = row % queries
    own = query + b.to(tl.int64) * query_batch + place * query_token
    own += (head * group_heads + row // queries) * query_head
    whole = (row < rows)[None, :] & (channel >= 0)[:, None]
    states = tl.load(own[None, :] + channel[:, None], whole, 0).to(tl.float32) * scaling
    mask_row = b.to(tl.int64) * mask_batch + place * mask_query
    return row, place, own, whole, states, mask_row


@triton.jit
def leave(sums_out, peaks_out, sums, peak, total, to, there, channel, whole, D):
    """What a program found of rows ``[R]`` and their channels ``[K]``, for `join`, at ``to`` ``[R]``."""
    tl.store(peaks_out + to * 2, peak, there)
    tl.store(peaks_out + to * 2 + 1, total, there)
    tl.store(sums_out + to[None, :] * D + channel[:, None], sums, whole)


@triton.jit
def attend_rows(
    right,
    unit,
    key,
    value,
    key_stride,
    value_stride,
    count,
    cos,
    sin,
    columns,
    start,
    limit,
    query_place,
    channel,
    other,
    value_channel,
    mask,
    mask_row,
    mask_token,
    softcap,
    peak,
    total,
    sums,
    D: tl.constexpr,
    TURN: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """``count`` rows of a head at ``key`` and ``value``, joined to ``peak``, ``total`` and ``sums``. The
    query comes as by `products.to_halves`.

    Where ``LISTED`` their columns are at ``columns``, and those from ``limit`` on are not seen; otherwise
    they start at ``start``. ``CAUSAL``: the i-th is seen by queries from the i-th on.
    """
    half: tl.constexpr = D // 2
    for at in tl.range(0, count, STEP, num_stages=1):
        token = at + tl.arange(0, STEP)
        there = token < count
        whole = there[:, None] & (channel >= 0)[None, :]
        row = key + token.to(tl.int64)[:, None] * key_stride
        keys = tl.load(row + channel[None, :], whole, 0).to(tl.float32)
        if TURN:
            partner = tl.load(row + other[None, :], whole, 0).to(tl.float32)
            partner = tl.where((channel < half)[None, :], partner, -partner)
            angle = token[:, None] * half + (channel % half)[None, :]
            keys = keys * tl.load(cos + angle, whole, 0) - partner * tl.load(sin + angle, whole, 0)
        scores = tl.dot(small(keys), right) * (unit / SMALL)
        if SOFTCAP:
            scores = capped(scores, softcap)
        if LISTED:
            column = tl.load(columns + token, there, -1)
            there = (column >= 0) & (column < limit)
        else:
            column = start + token
        seen = there[:, None]
        if CAUSAL:
            seen = seen & (query_place[None, :] >= token[:, None])
        scores = masked(scores, mask, column * mask_token, mask_row, seen, MASK)
        weights, peak, total, sums = weigh(scores, peak, total, sums)
        row = value + token.to(tl.int64)[None, :] * value_stride
        whole = (token < count)[None, :] & (value_channel >= 0)[:, None]
        values = tl.load(row + value_channel[:, None], whole, 0).to(tl.float32)
        sums += tl.dot(small(values), weights.to(tl.float16)) / SMALL
    return peak, total, sums


@triton.jit
def attend_exact(
    right,
    unit,
    newest_key,
    newest_value,
    tail,
    sinks,
    sink_at,
    mask,
    tail_cos,
    tail_sin,
    sink_cos,
    sink_sin,
    b,
    head,
    limit,
    past,
    tail_count,
    sink_count,
    queries,
    kv_heads,
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
    mask_row,
    mask_token,
    query_place,
    channel,
    other,
    value_channel,
    softcap,
    peak,
    total,
    sums,
    D: tl.constexpr,
    TURN: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """All that a head of one sequence keeps exactly: tail, sinks and the newest tokens, by `attend_rows`.

    Rows of tail and sinks are keys and, ``kv_heads * D`` further, values.
    """
    half: tl.constexpr = D // 2
    width, at, b = kv_heads * D, head * D, b.to(tl.int64)
    peak, total, sums = attend_rows(
        right, unit, tail + b * tail_batch + at, tail + b * tail_batch + at + width,
        tail_token, tail_token, tail_count,
        tail_cos + b * tail_count * half, tail_sin + b * tail_count * half,
        sink_at, limit, limit, query_place, channel, other, value_channel,
        mask, mask_row, mask_token, softcap, peak, total, sums,
        D, TURN, False, False, MASK, SOFTCAP,
    )  # fmt: skip
    peak, total, sums = attend_rows(
        right, unit, sinks + b * sink_batch + at, sinks + b * sink_batch + at + width,
        sink_token, sink_token, sink_count,
        sink_cos + b * sink_count * half, sink_sin + b * sink_count * half,
        sink_at + b * sink_count, 0, limit, query_place, channel, other, value_channel,
        mask, mask_row, mask_token, softcap, peak, total, sums,
        D, TURN, True, False, MASK, SOFTCAP,
    )  # fmt: skip
    return attend_rows(
        right, unit,
        newest_key + b * key_batch + head * key_head,
        newest_value + b * value_batch + head * value_head,
        key_token, value_token, queries, tail_cos, tail_sin,
        sink_at, past, limit, query_place, channel, other, value_channel,
        mask, mask_row, mask_token, softcap, peak, total, sums,
        D, False, False, MASK == NONE, MASK, SOFTCAP,
    )  # fmt: skip

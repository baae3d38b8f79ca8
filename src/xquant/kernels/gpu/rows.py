"""Attention over tokens that are kept as they are, inside a Triton kernel."""

import triton
import triton.language as tl

from .products import SMALL, small
from .softmax import capped, masked, weigh

STEP = tl.constexpr(32)


@triton.jit
def attend_rows(
    left,
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
        whole = there[None, :] & (channel >= 0)[:, None]
        row = key + token.to(tl.int64)[None, :] * key_stride
        keys = tl.load(row + channel[:, None], whole, 0).to(tl.float32)
        if TURN:
            partner = tl.load(row + other[:, None], whole, 0).to(tl.float32)
            partner = tl.where((channel < half)[:, None], partner, -partner)
            angle = token[None, :] * half + (channel % half)[:, None]
            keys = keys * tl.load(cos + angle, whole, 0) - partner * tl.load(sin + angle, whole, 0)
        scores = tl.dot(left, small(keys)) * (unit / SMALL)
        if SOFTCAP:
            scores = capped(scores, softcap)
        if LISTED:
            column = tl.load(columns + token, there, -1)
            there = (column >= 0) & (column < limit)
        else:
            column = start + token
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (query_place[:, None] >= token[None, :])
        scores = masked(scores, mask, mask_row, column * mask_token, seen, MASK)
        weights, peak, total, sums = weigh(scores, peak, total, sums)
        row = value + token.to(tl.int64)[:, None] * value_stride
        whole = (token < count)[:, None] & (value_channel >= 0)[None, :]
        values = tl.load(row + value_channel[None, :], whole, 0).to(tl.float32)
        sums += tl.dot(weights.to(tl.float16), small(values)) / SMALL
    return peak, total, sums

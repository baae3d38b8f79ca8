"""Attention over exact tokens (tail, sinks and the newest), and what all kernels share that attend.

Letters: ``R`` rows of a program, which are query heads times queries of one key/value head; ``K`` channels of
a head, padded to a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .codes import QUARTER
from .products import LOW, one_column, quarter, reciprocal, two_columns
from .softmax import NONE, masked, soft_capped, softmax_step

STEP = tl.constexpr(32)  # tokens that are read at a time


class Queries(NamedTuple):
    """The rows of a program, as `queries_of` makes them."""

    data: Any
    """fp16 ``[K, 2 R]``: see `products.two_columns`."""
    unit: Any
    """fp32 ``[1, R]``: what scores are to be multiplied with."""
    place: Any
    """``[R]``: which of the newest tokens each row is the query of."""


class Channels(NamedTuple):
    """The order of the channels of a head, ``[K]`` each, -1 where there is none."""

    key: Any
    partner: Any
    """The channel with which RoPE rotates each of ``key``."""
    value: Any


@triton.jit
def queries_of(states, place):
    """`Queries` of scaled queries fp32 ``[K, R]``; each is divided by its largest element."""
    unit = tl.max(tl.abs(states), 0)[None, :]
    return Queries(two_columns(states * reciprocal(unit), 1), unit, place)


@triton.jit
def run_of(runs, b, count, start, PAGED: tl.constexpr):
    """Where exact tokens of a sequence lie: in which row, and from which place of it on; how many they are;
    where the first stands in the sequence. All sequences have ``count`` of them, from ``start`` on, in rows
    of their own; where ``PAGED``, each has what int32 ``[B, 4]`` at ``runs`` says."""
    if PAGED:
        at = runs + b * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return b, 0, count, start


@triton.jit
def row_pointers(query, b, head, row, shape):
    """Of rows ``[R]`` of a key/value head: the number of each one's query among the newest tokens, and a
    pointer to it."""
    place = row % shape.queries
    pointer = query.data + b.to(tl.int64) * query.batch_stride + place * query.token_stride
    return place, pointer + (head * shape.group_heads + row // shape.queries) * query.head_stride


@triton.jit
def load_rows(query, b, head, program, channel, shape, scaling, ROWS: tl.constexpr):
    """Load ROWS rows of a key/value head, from number ``program * ROWS`` on, with ``channel`` ``[K]`` of
    each.

    Returns:
        the numbers of the rows ``[R]``; what `row_pointers` says of them; which elements are there ``[K,
        R]``; the scaled queries, fp32 ``[K, R]``.
    """
    row, rows = program * ROWS + tl.arange(0, ROWS), shape.group_heads * shape.queries
    place, pointer = row_pointers(query, b, head, row, shape)
    there = (row < rows)[None, :] & (channel >= 0)[:, None]
    states = tl.load(pointer[None, :] + channel[:, None], there, 0).to(tl.float32) * scaling
    return row, place, pointer, there, states


@triton.jit
def store_split(sums_out, maxima_out, sums, maximum, total, to, row_there, channel, there, D):
    """Write this split's sums ``[K, R]``, running maximum and total ``[R]`` to workspace rows ``to`` ``[R]``;
    `combine` reads them."""
    tl.store(maxima_out + to * 2, maximum, row_there)
    tl.store(maxima_out + to * 2 + 1, total, row_there)
    tl.store(sums_out + to[None, :] * D + channel[:, None], sums, there)


@triton.jit
def add_rows(
    queries,
    key,
    value,
    key_stride,
    value_stride,
    first,
    count,
    capacity,
    cos,
    sin,
    columns,
    start,
    limit,
    channels,
    mask,
    mask_row,
    softcap,
    maximum,
    total,
    sums,
    D: tl.constexpr,
    ROTATE: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Add ``count`` tokens to an online softmax, with a head's keys at ``key`` and its values at ``value``,
    from place ``first`` on. The place behind ``capacity - 1`` is 0, where there is a capacity.

    Where ``LISTED``, their columns are at ``columns``, and those from ``limit`` on are not seen; otherwise
    they start at ``start``. ``CAUSAL``: the i-th token is seen by queries from the i-th on. ``ROTATE``:
    keys are rotated by the angles fp32 ``[count, D/2]`` at ``cos`` and ``sin``.
    """
    channel, value_channel = channels.key, channels.value
    half: tl.constexpr = D // 2
    for at in tl.range(0, count, STEP, num_stages=1):
        token = at + tl.arange(0, STEP)
        there = token < count
        whole = there[:, None] & (channel >= 0)[None, :]
        place = first + token
        if capacity is not None:
            place = tl.where(place < capacity, place, place - capacity)
        row = key + place.to(tl.int64)[:, None] * key_stride
        keys = tl.load(row + channel[None, :], whole, 0).to(tl.float32)
        if ROTATE:
            partner = tl.load(row + channels.partner[None, :], whole, 0).to(tl.float32)
            partner = tl.where((channel < half)[None, :], partner, -partner)
            angle = token[:, None] * half + (channel % half)[None, :]
            keys = keys * tl.load(cos + angle, whole, 0) - partner * tl.load(sin + angle, whole, 0)
        scores = one_column(tl.dot(quarter(keys), queries.data), 1) * (queries.unit / QUARTER)
        if SOFTCAP:
            scores = soft_capped(scores, softcap)
        if LISTED:
            column = tl.load(columns + token, there, -1)
            there = (column >= 0) & (column < limit)
        else:
            column = start + token
        seen = there[:, None]
        if CAUSAL:
            seen = seen & (queries.place[None, :] >= token[:, None])
        scores = masked(scores, mask, mask_row, column, seen, MASK)
        weights, maximum, total, sums = softmax_step(scores, maximum, total, sums)
        row = value + place.to(tl.int64)[None, :] * value_stride
        whole = (token < count)[None, :] & (value_channel >= 0)[:, None]
        values = tl.load(row + value_channel[:, None], whole, 0).to(tl.float32)
        product = tl.dot(quarter(values), two_columns(weights, LOW))
        sums += one_column(product, LOW) / QUARTER
    return maximum, total, sums


@triton.jit
def add_exact(
    queries,
    key,
    value,
    tail,
    sinks,
    mask,
    mask_row,
    b,
    head,
    limit,
    new_runs,
    tail_runs,
    sink_runs,
    shape,
    channels,
    softcap,
    maximum,
    total,
    sums,
    D: tl.constexpr,
    ROTATE: tl.constexpr,
    PAGED: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Add the exact tokens of a head and sequence to an online softmax: tail, sinks and the newest.

    The newest keys come rotated; those of tail and sinks are rotated where ``ROTATE``. The tail is that of
    the cache behind ``limit``; where ``PAGED``, a ring.
    """
    half: tl.constexpr = D // 2
    width, at = shape.kv_heads * D, head * D
    row, first, count, start = run_of(tail_runs, b, tail_runs, limit, PAGED)
    tail_rows = tail.data + row.to(tl.int64) * tail.batch_stride + at
    angle = b.to(tl.int64) * count * half
    maximum, total, sums = add_rows(
        queries, tail_rows, tail_rows + width, tail.token_stride, tail.token_stride,
        first, count, tail.capacity, tail.cos + angle, tail.sin + angle,
        tail.columns, start, limit, channels, mask, mask_row, softcap, maximum, total, sums,
        D, ROTATE, False, False, MASK, SOFTCAP,
    )  # fmt: skip
    if sink_runs is not None:
        row, first, count, start = run_of(sink_runs, b, sink_runs, 0, PAGED)
        sink_rows = sinks.data + row.to(tl.int64) * sinks.batch_stride + at
        angle = b.to(tl.int64) * count * half
        maximum, total, sums = add_rows(
            queries, sink_rows, sink_rows + width, sinks.token_stride, sinks.token_stride,
            first, count, sinks.capacity, sinks.cos + angle, sinks.sin + angle,
            sinks.columns + b * count, start, limit, channels, mask, mask_row, softcap, maximum, total, sums,
            D, ROTATE, not PAGED, False, MASK, SOFTCAP,
        )  # fmt: skip
    row, first, count, start = run_of(new_runs, b, shape.queries, new_runs, PAGED)
    row = row.to(tl.int64)
    return add_rows(
        queries,
        key.data + row * key.batch_stride + head * key.head_stride,
        value.data + row * value.batch_stride + head * value.head_stride,
        key.token_stride, value.token_stride, first, count, None, tail.cos, tail.sin,
        tail.columns, start, limit, channels, mask, mask_row, softcap, maximum, total, sums,
        D, False, False, MASK == NONE, MASK, SOFTCAP,
    )  # fmt: skip

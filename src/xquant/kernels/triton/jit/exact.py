"""Attention over exact tokens (tail, sinks and the newest), and what all kernels share that attend.

Letters: ``R`` rows of a program, which are query heads times queries of one key/value head; ``K`` channels of
a head, padded to a power of two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .codes import QUARTER
from .products import LOW, divided, one_column, quarter, two_columns
from .softmax import NONE, Softmax, seen_scores, softmax_weights

STEP = tl.constexpr(32)  # tokens that are read at a time


class HeadRows(NamedTuple):
    """Rows of a key/value head, as `load_rows` has them."""

    number: Any
    """``[R]``: which of the head's rows they are."""
    place: Any
    """``[R]``: which of the newest tokens each is the query of."""
    pointer: Any
    """``[R]``: where their queries lie."""
    there: Any
    """bool ``[K, R]``: which elements there are."""
    states: Any
    """fp32 ``[K, R]``: the scaled queries."""


class Queries(NamedTuple):
    """The rows of a program, divided by their largest elements, and what makes scores of them."""

    data: Any
    """fp16 ``[K, 2 R]``: see `products.two_columns`."""
    unit: Any
    """fp32 ``[1, R]``: what scores are to be multiplied with."""
    place: Any
    mask: Any
    """`softmax.Mask`."""
    softcap: Any


class Channels(NamedTuple):
    """The order of the channels of a head, ``[K]`` each, -1 where there is none."""

    key: Any
    partner: Any
    """The channel with which RoPE rotates each of ``key``."""
    value: Any


class Run(NamedTuple):
    """Where exact tokens of a sequence lie."""

    row: Any
    first: Any
    """The place of the first in the row."""
    count: Any
    start: Any
    """Where the first stands in the sequence."""


class Tokens(NamedTuple):
    """Keys and values of a head in the row of a `Run`, by pointers to what lies at place 0; the rest as of
    `ExactRows`."""

    key: Any
    key_stride: Any
    value: Any
    value_stride: Any
    cos: Any
    sin: Any
    columns: Any
    capacity: Any


@triton.jit
def run_of(runs, b, count, start, PAGED: tl.constexpr):
    """The `Run` of a sequence. All have ``count`` tokens, from ``start`` on, in rows of their own; where
    ``PAGED``, each has what int32 ``[B, 4]`` at ``runs`` says."""
    if PAGED:
        at = runs + b * 4
        return Run(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    else:
        return Run(b, 0, count, start)


@triton.jit
def row_pointers(query, b, head, row, shape):
    """Of rows ``[R]`` of a key/value head: the number of each one's query among the newest tokens, and a
    pointer to it."""
    place = row % shape.queries
    pointer = query.data + b.to(tl.int64) * query.batch_stride + place * query.token_stride
    return place, pointer + (head * shape.group_heads + row // shape.queries) * query.head_stride


@triton.jit
def load_rows(call, b, head, program, channel, ROWS: tl.constexpr):
    """Load ROWS `HeadRows` of a head, from number ``program * ROWS`` on, with ``channel`` ``[K]`` of
    each."""
    shape = call.shape
    row, rows = program * ROWS + tl.arange(0, ROWS), shape.group_heads * shape.queries
    place, pointer = row_pointers(call.query, b, head, row, shape)
    there = (row < rows)[None, :] & (channel >= 0)[:, None]
    states = tl.load(pointer[None, :] + channel[:, None], there, 0).to(tl.float32) * call.scaling
    return HeadRows(row, place, pointer, there, states)


@triton.jit
def store_split(sums_out, maxima_out, softmax, to, row_there, channel, D):
    """Write this split's `Softmax`, of channels ``[K]``, to workspace rows ``to`` ``[R]``; `combine` reads
    them."""
    tl.store(maxima_out + to * 2, softmax.maximum, row_there)
    tl.store(maxima_out + to * 2 + 1, softmax.total, row_there)
    there = row_there[None, :] & (channel >= 0)[:, None]
    tl.store(sums_out + to[None, :] * D + channel[:, None], softmax.sums, there)


@triton.jit
def add_rows(
    queries, tokens, run, b, limit, channels, softmax,
    D: tl.constexpr, ROTATE: tl.constexpr, LISTED: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add the `Tokens` of a run to a softmax. The place behind ``capacity - 1`` is 0, where there is a
    capacity.

    Where ``LISTED``, their columns are those of the tokens, and the ones from ``limit`` on are not seen.
    ``CAUSAL``: the i-th token is seen by queries from the i-th on. ``ROTATE``: keys are rotated.
    """
    channel, value_channel = channels.key, channels.value
    half: tl.constexpr = D // 2
    maximum, total, sums = softmax.maximum, softmax.total, softmax.sums
    if ROTATE:
        angles = b.to(tl.int64) * run.count * half
        cosines, sines = tokens.cos + angles, tokens.sin + angles
    for at in tl.range(0, run.count, STEP, num_stages=1):
        token = at + tl.arange(0, STEP)
        there = token < run.count
        whole = there[:, None] & (channel >= 0)[None, :]
        place = run.first + token
        if tokens.capacity is not None:
            place = tl.where(place < tokens.capacity, place, place - tokens.capacity)
        row = tokens.key + place.to(tl.int64)[:, None] * tokens.key_stride
        keys = tl.load(row + channel[None, :], whole, 0).to(tl.float32)
        if ROTATE:
            partner = tl.load(row + channels.partner[None, :], whole, 0).to(tl.float32)
            partner = tl.where((channel < half)[None, :], partner, -partner)
            angle = token[:, None] * half + (channel % half)[None, :]
            cos, sin = tl.load(cosines + angle, whole, 0), tl.load(sines + angle, whole, 0)
            keys = keys * cos - partner * sin
        scores = one_column(tl.dot(quarter(keys), queries.data), 1) * (queries.unit / QUARTER)
        if LISTED:
            column = tl.load(tokens.columns + b * run.count + token, there, -1)
            there = (column >= 0) & (column < limit)
        else:
            column = run.start + token
        seen = there[:, None]
        if CAUSAL:
            seen = seen & (queries.place[None, :] >= token[:, None])
        scores = seen_scores(scores, queries.softcap, queries.mask, column, seen, MASK, SOFTCAP)
        weights, shrink, maximum = softmax_weights(scores, maximum)
        total = total * shrink + tl.sum(weights, 0)
        row = tokens.value + place.to(tl.int64)[None, :] * tokens.value_stride
        whole = (token < run.count)[None, :] & (value_channel >= 0)[:, None]
        values = tl.load(row + value_channel[:, None], whole, 0).to(tl.float32)
        product = tl.dot(quarter(values), two_columns(weights, LOW))
        sums = sums * shrink[None, :] + one_column(product, LOW) / QUARTER
    return Softmax(maximum, total, sums)


@triton.jit
def add_exact(
    call, mask, memory, rows, b, head, limit, tail_count, sink_count, channels, softmax,
    D: tl.constexpr, SINKS: tl.constexpr, ROTATE: tl.constexpr, PAGED: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add the exact tokens of a head and sequence to the softmax of `HeadRows`: tail, sinks and the newest.

    The newest keys come rotated; those of tail and sinks are rotated where ``ROTATE``. The tail is that of
    the cache behind ``limit``; where ``PAGED``, a ring.
    """
    states, unit = divided(rows.states)
    queries = Queries(two_columns(states, 1), unit, rows.place, mask, call.softcap)
    tail, sinks, key, value, runs = memory.tail, memory.sinks, call.key, call.value, memory.runs
    width, at = call.shape.kv_heads * D, head * D
    run = run_of(runs.tail if PAGED else None, b, tail_count, limit, PAGED)
    row = tail.data + run.row.to(tl.int64) * tail.batch_stride + at
    tokens = Tokens(
        row, tail.token_stride, row + width, tail.token_stride, tail.cos, tail.sin, None, tail.capacity
    )  # fmt: skip
    softmax = add_rows(
        queries, tokens, run, b, limit, channels, softmax, D, ROTATE, False, False, MASK, SOFTCAP
    )
    if SINKS or not PAGED:
        run = run_of(runs.sinks if PAGED else None, b, sink_count, 0, PAGED)
        row = sinks.data + run.row.to(tl.int64) * sinks.batch_stride + at
        tokens = Tokens(
            row, sinks.token_stride, row + width, sinks.token_stride, sinks.cos, sinks.sin,
            sinks.columns, None,
        )  # fmt: skip
        softmax = add_rows(
            queries, tokens, run, b, limit, channels, softmax, D, ROTATE, not PAGED, False, MASK, SOFTCAP
        )  # fmt: skip
    past = None if PAGED else limit + tail_count
    run = run_of(runs.new if PAGED else None, b, call.shape.queries, past, PAGED)
    row = run.row.to(tl.int64)
    tokens = Tokens(
        key.data + row * key.batch_stride + head * key.head_stride, key.token_stride,
        value.data + row * value.batch_stride + head * value.head_stride, value.token_stride,
        None, None, None, None,
    )  # fmt: skip
    return add_rows(
        queries, tokens, run, b, limit, channels, softmax, D, False, False, MASK == NONE, MASK, SOFTCAP
    )  # fmt: skip

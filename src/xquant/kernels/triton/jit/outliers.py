"""Outliers of a packed block, inside a Triton kernel: what they add to scores and to sums of values.

A token's outliers lie by channel, so those of a head follow each other. They are few: about one of a token in
a head where one channel in a hundred is. So no tile is made of them. Keys are multiplied one by one with what
the query has in their channel. Values are listed, and a product is taken of the list.

Axes are in such an order that a thread has one outlier at a time, and all rows of it: Triton gives the first
axis of what it gathers from memory to the threads of a warp.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .codes import QUARTER, Block, pointer
from .halves import as_halves, equal, word_of_numbers
from .products import LOW, two_columns

STEP = tl.constexpr(2)  # outliers of a key that are read at a time
GROUP = tl.constexpr(16)  # tokens with one list of values; twice as many values are read at a time


class Outliers(NamedTuple):
    """The outliers of a head in a block."""

    block: Block
    begin: Any
    """int32 ``[NP]``: where those of each token begin among those of the block."""
    end: Any


@triton.jit
def channel_at(block, place, there):
    """The channel of an outlier within its token; 65535, which none is, where it is not there."""
    return tl.load(pointer(block.outlier_channel, tl.uint16) + place, there, 0xFFFF).to(tl.int32)


@triton.jit
def residual_at(block, place, there):
    return tl.load(pointer(block.outlier_excess, tl.float16) + place, there, 0).to(tl.float32)


@triton.jit
def of_both(keys, values, dtype: tl.constexpr):
    """Pointers ``[2, 1]`` to a field of keys and to that of values."""
    return tl.where(tl.arange(0, 2) == 0, keys, values).to(tl.pointer_type(dtype))[:, None]


@triton.jit
def one_of_both(x, NUMBER: tl.constexpr):
    """``x`` ``[2, NP]`` of keys or of values."""
    return tl.sum(tl.where((tl.arange(0, 2) == NUMBER)[:, None], x, 0), 0)


@triton.jit
def outliers_of(keys, values, token, first, D: tl.constexpr, COUNT_BYTES: tl.constexpr):
    """The `Outliers` of a head's keys and of its values in two blocks.

    ``token`` ``[NP]``: those of the block, rising, -1 where there is none; ``first``: the channel that the
    head begins with.
    """
    NP: tl.constexpr = token.shape[0]
    dtype: tl.constexpr = tl.uint8 if COUNT_BYTES == 1 else tl.uint16
    counts = of_both(keys.outlier_count, values.outlier_count, dtype)
    channels = of_both(keys.outlier_channel, values.outlier_channel, tl.uint16)[:, :, None]
    count = tl.load(counts + token[None, :], (token >= 0)[None, :], 0).to(tl.int32)
    end = tl.cumsum(count, 1)
    # A binary search for the first of the head, and for the first behind it.
    place, end = tl.broadcast_to((end - count)[:, :, None], (2, NP, 2)), end[:, :, None]
    bound = (first + D * tl.arange(0, 2))[None, None, :]
    step, most = 1, tl.max(count)
    while step * 2 <= most:
        step *= 2
    while step > 0:
        further = place + step
        found = tl.load(channels + (further - 1), further <= end, 0xFFFF).to(tl.int32)
        place = tl.where(found < bound, further, place)
        step //= 2
    begin, end = tl.split(place)
    return (
        Outliers(keys, one_of_both(begin, 0), one_of_both(end, 0)),
        Outliers(values, one_of_both(begin, 1), one_of_both(end, 1)),
    )


@triton.jit
def outlier_scores(
    outliers, token, rows, rows_there, rope, start, first,
    D: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """What the outliers of a block's keys add to its scores, before scaling: fp32 ``[NP, R]``.

    Args:
        rows: pointers ``[R]`` to the queries, of which ``rows_there`` says those that are.
        rope: `BlockRope`, where ``ROTATE``.
        start: which of its starts is that of the block.
    """
    half: tl.constexpr = D // 2
    NP: tl.constexpr = token.shape[0]
    scores = tl.zeros([STEP, NP, rows.shape[0]], tl.float32)
    place = outliers.begin[None, :] + tl.arange(0, STEP)[:, None]
    rows, rows_there = rows[None, None, :], rows_there[None, None, :]
    for _ in range(0, tl.max(outliers.end - outliers.begin, 0), STEP):
        there = place < outliers.end[None, :]
        channel = channel_at(outliers.block, place, there) - first
        x = residual_at(outliers.block, place, there)
        query_there = there[:, :, None] & rows_there
        query = tl.load(rows + channel[:, :, None], query_there, 0).to(tl.float32)
        if ROTATE:
            low = channel < half
            pair = tl.where(low, channel, channel - half)
            within, from_start = token[None, :] * half + pair, start * half + pair
            within_cos = tl.load(rope.within_cos + within, there, 0)
            within_sin = tl.load(rope.within_sin + within, there, 0)
            start_cos = tl.load(rope.start_cos + from_start, there, 0)
            start_sin = tl.load(rope.start_sin + from_start, there, 0)
            cos = x * (within_cos * start_cos - within_sin * start_sin)
            sin = x * (within_sin * start_cos + within_cos * start_sin)
            sin = tl.where(low, sin, -sin)
            partner = tl.where(low, channel + half, pair)
            partner = tl.load(rows + partner[:, :, None], query_there, 0).to(tl.float32)
            scores += query * cos[:, :, None] + partner * sin[:, :, None]
        else:
            scores += query * x[:, :, None]
        place += STEP
    return tl.sum(scores, 0)


@triton.jit
def doubled(x):
    """Each element along the last axis, of GROUP elements, twice: Triton 3.6 gathers as many as there are."""
    both = tl.join(x, x)
    if len(x.shape) == 2:
        return tl.reshape(both, (x.shape[0], 2 * GROUP))
    else:
        return tl.reshape(both, (x.shape[0], x.shape[1], 2 * GROUP))


@triton.jit
def outlier_sums(sums, outliers, weights, channel, first):
    """Add to ``sums`` fp32 ``[DP, 2 R]``, which are those of `two_columns`, a quarter of what the outliers of
    a block's values come to by ``weights`` fp32 ``[NP, R]``, of each ``channel`` ``[DP]``."""
    NP: tl.constexpr = weights.shape[0]
    R: tl.constexpr = weights.shape[1]
    groups: tl.constexpr = NP // GROUP
    count = tl.reshape(outliers.end - outliers.begin, (groups, GROUP))
    end = tl.reshape(outliers.end, (groups, GROUP))
    behind = tl.cumsum(count, 1)
    # Of each token: the number, in the list of its group, of its first outlier; by how much places in the
    # block are more than numbers.
    listed, moved, end = doubled(behind - count), doubled(end - behind), doubled(end)
    weights = doubled(tl.reshape(tl.trans(weights), (R, groups, GROUP)))
    lane = channel + first
    lane = word_of_numbers(lane, lane)[:, None]
    number = tl.broadcast_to(tl.arange(0, 2 * GROUP)[None, :], (groups, 2 * GROUP))
    for _ in range(0, tl.max(behind), 2 * GROUP):
        # A binary search for the token, whose index is twice its number.
        token = tl.zeros_like(number)
        for step in tl.static_range(4, 0, -1):
            further = token + (1 << step)
            token = tl.where(tl.gather(listed, further, 1) <= number, further, token)
        place = tl.gather(moved, token, 1) + number
        there = place < tl.gather(end, token, 1)
        x = residual_at(outliers.block, place, there) * QUARTER
        token = tl.broadcast_to(token[None, :, :], (R, groups, 2 * GROUP))
        columns = tl.gather(weights, token, 2) * x[None, :, :]
        columns = two_columns(tl.trans(tl.reshape(columns, (R, 2 * NP))), LOW)
        place = tl.reshape(place, (groups, GROUP, 2))
        there = tl.reshape(there, (groups, GROUP, 2))
        even, odd = tl.split(channel_at(outliers.block, place, there))
        hot = equal(lane, tl.reshape(word_of_numbers(even, odd), (1, NP)))
        sums = tl.dot(as_halves(hot, channel.shape[0], 2 * NP), columns, sums)
        number += 2 * GROUP
    return sums

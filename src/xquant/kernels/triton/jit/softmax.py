"""Online softmax inside a Triton kernel: a softmax over runs of tokens that come one after the other.

Of scores ``s`` and values ``v``, a row keeps the running maximum ``m``, the total ``l`` and the sums ``o``::

    m = max s
    l = sum exp(s - m)
    o = sum exp(s - m) v

More tokens make of them::

    m' = max(m, max s)
    w  = exp(s - m')
    l' = exp(m - m') l + sum w
    o' = exp(m - m') o + sum w v

and ``o / l`` is the result. The reference is `blockwise.OnlineSoftmax`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # below every score, yet a score minus it is a number

# Kinds of masks: none (only the newest tokens are causal), bool, or added to scores.
NONE, BOOLS, ADDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Mask(NamedTuple):
    """A mask ``[B, 1, t, T]``, bool or added to scores, as the rows of a program read it."""

    data: Any
    token_stride: Any
    rows: Any
    """``[R]``: where the mask of each row begins, see `mask_rows`."""


class Softmax(NamedTuple):
    """What rows have of the tokens so far."""

    maximum: Any
    """``m``, fp32 ``[R]``."""
    total: Any
    """``l``, fp32 ``[R]``."""
    sums: Any
    """``o``, fp32 ``[D, R]``."""


@triton.jit
def empty_softmax(R: tl.constexpr, D: tl.constexpr):
    """The `Softmax` of no tokens."""
    zeros = tl.zeros([R], tl.float32)
    return Softmax(tl.full([R], LOWEST, tl.float32), zeros, tl.zeros([D, R], tl.float32))


@triton.jit
def blocks_of_split(columns, splits):
    """How many of a sequence's ``columns`` blocks a split has. There are ``splits``, the first of which has
    the exact tokens; the last ones have nothing where blocks do not suffice."""
    return tl.maximum(tl.cdiv(columns, tl.maximum(splits - 1, 1)), 1)


@triton.jit
def soft_capped(scores, cap):
    """``cap * tanh(scores / cap)``."""
    return cap * (1 - 2 / (1 + tl.exp(2 * scores / cap)))


@triton.jit
def mask_rows(batch_stride, query_stride, b, place):
    """Where the mask of each row begins, ``[R]``; ``place`` ``[R]``: the number of its query among the newest
    tokens."""
    return b.to(tl.int64) * batch_stride + place * query_stride


@triton.jit
def seen_scores(scores, softcap, mask, column, seen, MASK: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores ``[T, R]`` of the tokens in columns ``[T]`` after the soft cap and the `Mask`; -inf where not
    ``seen`` ``[T, R | 1]``."""
    if SOFTCAP:
        scores = soft_capped(scores, softcap)
    if MASK != NONE:
        place = mask.data + (column * mask.token_stride)[:, None] + mask.rows[None, :]
        given = tl.load(place, seen, 0)
        if MASK == BOOLS:
            scores = tl.where(given != 0, scores, float("-inf"))
        else:
            scores += given.to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def softmax_weights(scores, maximum):
    """``w`` ``[T, R]``, ``exp(m - m')`` and ``m'`` ``[R]`` of scores ``[T, R]`` and the ``maximum`` ``m``."""
    raised = tl.maximum(maximum, tl.max(scores, 0))
    return tl.exp(scores - raised[None, :]), tl.exp(maximum - raised), raised

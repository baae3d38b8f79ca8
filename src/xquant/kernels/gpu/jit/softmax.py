"""A softmax over parts of the tokens that come one after the other, inside a Triton kernel."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # below every score, yet a score minus it is a number
NONE, BOOLS, ADDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of masks


@triton.jit
def capped(scores, cap):
    """``cap * tanh(scores / cap)``."""
    return cap * (1 - 2 / (1 + tl.exp(2 * scores / cap)))


@triton.jit
def masked(scores, mask, row_at, column_at, seen, MASK: tl.constexpr):
    """Scores ``[R, T]`` with the mask at ``row_at`` ``[R]`` and ``column_at`` ``[T]``, -inf where not
    ``seen`` ``[R | 1, T]``."""
    if MASK != NONE:
        given = tl.load(mask + row_at[:, None] + column_at[None, :], seen, 0)
        if MASK == BOOLS:
            scores = tl.where(given != 0, scores, float("-inf"))
        else:
            scores += given.to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def weigh(scores, peak, total, sums):
    """Weights ``[R, T]`` of another part; and what is there, of rows ``[R]`` and ``[R, D]``, shrunk to their
    peak, with the part in its total."""
    raised = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp(scores - raised[:, None])
    shrink = tl.exp(peak - raised)
    return weights, raised, total * shrink + tl.sum(weights, 1), sums * shrink[:, None]

"""A softmax over parts of the tokens that come one after the other, inside a Triton kernel."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # below every score, yet a score minus it is a number
NONE, BOOLS = tl.constexpr(0), tl.constexpr(1)  # kinds of masks; others are added


@triton.jit
def capped(scores, cap):
    """``cap * tanh(scores / cap)``."""
    return cap * (1 - 2 / (1 + tl.exp(2 * scores / cap)))


@triton.jit
def masked(scores, mask, column_at, row_at, seen, MASK: tl.constexpr):
    """Scores ``[T, R]`` of tokens and rows with the mask at ``column_at`` ``[T]`` and ``row_at`` ``[R]``,
    -inf where not ``seen`` ``[T, R | 1]``."""
    if MASK != NONE:
        given = tl.load(mask + column_at[:, None] + row_at[None, :], seen, 0)
        if MASK == BOOLS:
            scores = tl.where(given != 0, scores, float("-inf"))
        else:
            scores += given.to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def shares(scores, peak):
    """Weights ``[T, R]`` of another part, what those before are to be multiplied with, the peak ``[R]``."""
    raised = tl.maximum(peak, tl.max(scores, 0))
    return tl.exp(scores - raised[None, :]), tl.exp(peak - raised), raised


@triton.jit
def weigh(scores, peak, total, sums):
    """Weights ``[T, R]`` of another part; and what is there, of rows ``[R]`` and ``[D, R]``, shrunk to their
    peak, with the part in its total."""
    weights, shrink, raised = shares(scores, peak)
    return weights, raised, total * shrink + tl.sum(weights, 0), sums * shrink[None, :]

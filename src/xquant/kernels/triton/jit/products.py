"""Products of one head of a packed block with queries, and with weights, inside a Triton kernel.

What is packed is the left side (`unpack`), queries or weights are columns on the right. Operands are fp16,
sums fp32. A query is divided by its largest element first, and what rounding leaves of it is multiplied
too, so that keys and values are rounded, and nothing else that matters.
"""

import triton
import triton.language as tl

from .codebook import levels_of
from .codes import CENTERED, QUARTER, center, in_tile_order, load_words, pointer, unpacked
from .halves import add, as_halves, multiply, multiply_add, negative, word_of
from .unpack import decode, token_ranges

HALF_MAX = tl.constexpr(65504.0)
LOW = tl.constexpr(2048.0)  # what is left of weights is multiplied with: they may be small


@triton.jit
def reciprocal(x):
    """1 / x, 0 for 0."""
    return tl.where(x > 0, 1 / tl.where(x > 0, x, 1), 0)


@triton.jit
def divided(x):
    """``x`` ``[K, R]``, each column divided by its largest element; and these, ``[1, R]``."""
    unit = tl.max(tl.abs(x), 0)[None, :]
    return x * reciprocal(unit), unit


@triton.jit
def quarter(states):
    """A QUARTER of states in fp16, which saturate."""
    return tl.minimum(tl.maximum(states * QUARTER, -HALF_MAX), HALF_MAX).to(tl.float16)


@triton.jit
def high_and_low(x):
    """``x`` in fp16, and what rounding leaves of it, in fp16 too."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def two_columns(x, LOW: tl.constexpr, IN_TILE_ORDER: tl.constexpr = False):
    """``x`` fp32 ``[K, R]`` in fp16 ``[K, 2 R]``: beside each column what rounding leaves of it, times LOW.
    Rows are those of ``x``, or these `codes.in_tile_order`."""
    high = x.to(tl.float16).to(tl.float32)
    both = tl.reshape(tl.join(high, (x - high) * LOW), (x.shape[0], 2 * x.shape[1]))
    if IN_TILE_ORDER:
        both = in_tile_order(both, x.shape[0], 2 * x.shape[1])
    # Last: Triton 3.6 cannot compile products with what was reshaped.
    return both.to(tl.float16)


@triton.jit
def one_column(x, LOW: tl.constexpr):
    """Of a product ``[M, 2 R]`` with `two_columns`, that with the numbers they were made of."""
    high, low = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return high + low * (1 / LOW)


@triton.jit
def beside_zeros(x):
    """``x`` ``[M, R]`` as a product with `two_columns`, ``[M, 2 R]``."""
    return tl.reshape(tl.join(x, tl.zeros_like(x)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def rotated(x, cos, sin, M: tl.constexpr, K: tl.constexpr):
    """``x`` ``[M, K / 2]`` after RoPE by ``cos`` and ``sin`` ``[M, K / 4]``, all by words; channels are in
    the order of `codes.tile_order`."""
    low, high = tl.split(tl.permute(tl.reshape(x, (M, 2, 2, K // 8)), (0, 1, 3, 2)))
    cos, sin = tl.reshape(cos, (M, 2, K // 8)), tl.reshape(sin, (M, 2, K // 8))
    first = multiply_add(low, cos, multiply(negative(high), sin))
    second = multiply_add(high, cos, multiply(low, sin))
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (M, K // 2))


@triton.jit
def key_words(block, token, head, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """The packed codes of a head's keys, `codes.load_words`."""
    words = pointer(block.codes, tl.int32) + head * (D * N * BITS // 32)
    return load_words(words, token, D, DP, BITS)


@triton.jit
def value_words(block, channel, head, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BITS: tl.constexpr):
    """The same of its values."""
    words = pointer(block.codes, tl.int32) + head * (D * N * BITS // 32)
    return load_words(words, channel, N, NP, BITS)


@triton.jit
def block_scores(
    scores, block, words, table, offset, queries, token, channel, within_cos, within_sin, head, kv_heads,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LAYOUT: tl.constexpr,
    OFFSET: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """A quarter of the scores of a block, fp32 ``[NP, R]``: ``R(r) (k + offset) . q`` of its keys.

    Args:
        scores: fp32 ``[NP, 2 R]``, what they are added to, as of `two_columns`.
        queries: fp16 ``[DP, 2 R]``, of `two_columns`.
        within_cos: words ``[NP, DP / 4]``, the rotation ``R(r)`` of each place of a block, as ``within_sin``.
        offset: fp32 ``[G D]``, the bias of keys, which their codes do without.
    """
    level = levels_of(words, table, LAYOUT)
    keys = decode(block, level, token, channel, head * D, D, N, kv_heads * D, LAYOUT, True, NP, DP)
    if OFFSET:
        mean = tl.load(offset + head * D + channel, channel >= 0, 0) * QUARTER
        low, high = tl.split(tl.reshape(mean.to(tl.float16), (DP // 2, 2)))
        keys = add(keys, word_of(low, high)[None, :])
    if ROTATE:
        keys = rotated(keys, within_cos, within_sin, NP, DP)
    return one_column(tl.dot(as_halves(keys, NP, DP), queries, scores), 1)


@triton.jit
def block_sums(
    sums, block, words, table, weights, token, channel, head, kv_heads,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """A quarter of the sums of a block's values by ``weights`` fp16 ``[NP, R]``, added to ``sums`` fp32
    ``[DP, R]``."""
    level = levels_of(words, table, LAYOUT)
    values = decode(block, level, token, channel, head * D, D, N, kv_heads * D, LAYOUT, False, NP, DP)
    return tl.dot(as_halves(values, DP, NP), weights, sums)


@triton.constexpr_function
def folds(span: int) -> bool:
    """Whether values of such a layout are multiplied as they are packed, by `folded_sums`."""
    return span == 2


@triton.jit
def folded_sums(
    sums, block, words, table, weights, token, channel, head,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Sums of a block's values ``level * scale + zero`` of tokens by ``weights`` fp32 ``[NP, R]``. The scale
    goes into the weights::

        sum w (level * scale + zero) = sum (w scale) (level - center) + sum w (zero + center scale)

    Tokens are in the order of their places. Returns a quarter of the first sum, added to ``sums`` fp32
    ``[DP, 2 R]`` of `two_columns`, and what the second adds up, ``[NP, R]``.
    """
    scale, zero = token_ranges(block, token, head * D, N, LAYOUT)
    if LAYOUT.codebook:
        level = levels_of(words, table, LAYOUT)
    else:
        level = unpacked(words, LAYOUT.bits, CENTERED)
        zero += center(LAYOUT.bits) * scale
    columns = two_columns(weights * scale[:, None], LOW, True)
    return tl.dot(as_halves(level, DP, NP), columns, sums), weights * zero[:, None]

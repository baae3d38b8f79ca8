"""What is kept of tokens instead of keys and values, inside a Triton kernel: a chunk of channels of a block
at a time, as the left side of a product. The other side follows the order in which codes lie (`unpack.coded`,
`matrices.arranged`).
"""

import triton
import triton.language as tl

from .products import HALF_MAX
from .unpack import coded, decoded, field, numbers, pairs


@triton.jit
def coded_chunk(
    blocks,
    each,
    at,
    chunk,
    token,
    C,
    N: tl.constexpr,
    NP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """SMALL of a block, fp16 ``[NP, CHUNK]``: chunks follow each other through tiles of ``TILE`` channels.
    Lanes are tokens, as of `unpack.lanes`; what stands where there is no channel or no token is finite."""
    chunks: tl.constexpr = (TILE + CHUNK - 1) // CHUNK
    tile, part = chunk // chunks, chunk % chunks
    words = field(blocks, 0, each, at, tl.int32) + tile * (TILE * N * BITS // 32)
    found = pairs(words, token, TILE, CHUNK, BITS, NP, part)
    channel = coded(TILE, CHUNK, BITS, CHUNK, part)
    return decoded(
        blocks, each, at, numbers(found, None, BITS, False, NP, CHUNK), token, channel,
        tile * TILE, TILE, N, C, BITS, False, PER_TOKEN, SPAN, GROUP, 0, True, NP, CHUNK,
    )  # fmt: skip


@triton.jit
def row_chunk(rows, token_stride, begin, length, chunk, token, C, CHUNK: tl.constexpr, dtype):
    """Of rows, where nothing is packed: ``[NP, CHUNK]`` in ``dtype``."""
    channel = chunk * CHUNK + tl.arange(0, CHUNK)
    row = rows + (begin + token).to(tl.int64)[:, None] * token_stride
    there = (channel < C)[None, :] & ((token >= 0) & (token < length))[:, None]
    states = tl.load(row + channel[None, :], there, 0)
    if dtype == tl.float16:
        states = tl.minimum(tl.maximum(states.to(tl.float32), -HALF_MAX), HALF_MAX)
    return states.to(dtype)

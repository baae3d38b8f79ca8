"""The rows that keys and values are projected from, inside a Triton kernel.

They come a chunk of channels of a block at a time, as the left side of a product. The matrix on the right has
its channels in the same order (`codes.tile_order`, `matrices.by_chunk`).
"""

import triton
import triton.language as tl

from .codes import LEVEL, load_words, pointer, tile_order, unpacked
from .halves import as_halves
from .products import HALF_MAX
from .unpack import decode


@triton.jit
def packed_chunk(
    block, chunk, token, C,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """A quarter of a chunk of a packed block, fp16 ``[NP, CHUNK]``. Chunks follow each other through tiles of
    ``TILE`` channels, whose lanes are tokens.

    ``token`` ``[NP]``: as of `codes.lane_order`. Where there is no channel or no token, numbers are finite.
    """
    BITS: tl.constexpr = LAYOUT.bits
    chunks: tl.constexpr = (TILE + CHUNK - 1) // CHUNK
    tile, part = chunk // chunks, chunk % chunks
    words = pointer(block.codes, tl.int32) + tile * (TILE * N * BITS // 32)
    level = unpacked(load_words(words, token, TILE, CHUNK, BITS, part), BITS, LEVEL)
    channel = tile_order(TILE, CHUNK, BITS, CHUNK, part)
    states = decode(block, level, token, channel, tile * TILE, TILE, N, C, LAYOUT, True, NP, CHUNK)
    return as_halves(states, NP, CHUNK)


@triton.jit
def row_chunk(rows, token_stride, begin, length, chunk, token, C, CHUNK: tl.constexpr, dtype):
    """The same of rows that are not packed: ``[NP, CHUNK]`` in ``dtype``."""
    channel = chunk * CHUNK + tl.arange(0, CHUNK)
    row = rows + (begin + token).to(tl.int64)[:, None] * token_stride
    there = (channel < C)[None, :] & ((token >= 0) & (token < length))[:, None]
    states = tl.load(row + channel[None, :], there, 0)
    if dtype == tl.float16:
        states = tl.minimum(tl.maximum(states.to(tl.float32), -HALF_MAX), HALF_MAX)
    return states.to(dtype)

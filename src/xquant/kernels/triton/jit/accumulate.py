"""The kernel that adds what a layer keeps to the sum over the layers below (arXiv 2508.10395, section
3.2)."""

import triton
import triton.language as tl

from .codes import QUARTER, block_at, lane_order, tile_order
from .states import packed_chunk


@triton.jit(do_not_specialize=("columns", "sink_count"))
def accumulate(
    sums, blocks, matrix, sinks, sink_columns, columns, sink_count, C, width,
    N: tl.constexpr, NP: tl.constexpr, OUT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    TILE: tl.constexpr, LAYOUT: tl.constexpr, BELOW: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add the delta of a layer to the sum ``s`` over the layers below, in its memory. Of packed rows ``x``::

        s = s + W x      where WEIGHTED
        s = s + x        otherwise

    without ``s`` on the right where there is nothing ``BELOW``. At sinks, ``s`` becomes their exact row. The
    reference is `LayerCodec.recall` with `Sinks.placed`, from which it differs in the last bits. A block
    comes to the same numbers whatever other blocks there are.

    Grid: columns of blocks, runs of OUT channels (of chunks, where not ``WEIGHTED``), sequences.

    Args:
        sums: `Rows` ``[B, T, width]``, ``s``, to read and write.
        blocks: `Blocks`, with the FIELDS of the packed rows.
        matrix: `Matrix` ``[width, C]``, ``W``, where ``WEIGHTED``.
        sinks: ``[B, S, width]``, of ``sink_count`` sinks in the columns ``sink_columns`` int32 ``[B, S]``.
        CHUNK: channels that are multiplied at a time, ``CHUNKS`` times.
        TILE: channels of a tile of the packed rows, whose ``LAYOUT`` is an `operand.Layout`.
    """
    column, run, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = block_at(blocks.addresses + b * columns + column, tl.num_programs(2) * columns)
    begin, token = tl.load(blocks.begins + column), lane_order(N, NP)
    if WEIGHTED:
        channel = run * OUT + tl.arange(0, OUT)
        here = channel < width
        row = matrix.data + channel.to(tl.int64)[None, :] * (CHUNKS * CHUNK)
        added = tl.zeros([NP, OUT], tl.float32)
        for chunk in range(CHUNKS):
            states = packed_chunk(block, chunk, token, C, N, NP, TILE, CHUNK, LAYOUT)
            place = row + (chunk * CHUNK + tl.arange(0, CHUNK))[:, None]
            added = tl.dot(states, tl.load(place, here[None, :], 0), added)
        added *= tl.load(matrix.units + channel, here, 0)[None, :] / QUARTER
    else:
        chunks: tl.constexpr = (TILE + CHUNK - 1) // CHUNK
        channel = tile_order(TILE, CHUNK, LAYOUT.bits, CHUNK, run % chunks)
        here = channel >= 0
        channel += run // chunks * TILE
        states = packed_chunk(block, run, token, C, N, NP, TILE, CHUNK, LAYOUT)
        added = states.to(tl.float32) / QUARTER
    there = ((token >= 0) & (token < tl.load(blocks.lengths + column)))[:, None] & here[None, :]
    place = sums.data + b.to(tl.int64) * sums.batch_stride + channel[None, :]
    place += (begin + token).to(tl.int64)[:, None] * sums.token_stride
    if BELOW:
        added += tl.load(place, there, 0).to(tl.float32)
    for s in range(sink_count):
        sink = b * sink_count + s
        at = tl.load(sink_columns + sink) - begin
        exact = tl.load(sinks + sink * width + channel, here, 0).to(tl.float32)
        added = tl.where((token == at)[:, None] & (at >= 0), exact[None, :], added)
    tl.store(place, added.to(sums.data.dtype.element_ty), there)

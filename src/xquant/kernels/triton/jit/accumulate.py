"""The kernel that adds what a layer keeps to the sum of those below (arXiv 2508.10395, section 3.2)."""

import triton
import triton.language as tl

from .states import coded_chunk
from .unpack import SMALL, coded, lanes


@triton.jit(do_not_specialize=("columns", "sink_count"))
def accumulate(
    sums_in_out,
    blocks,
    begins,
    lengths,
    weights,
    units,
    sinks,
    sink_at,
    columns,
    sink_count,
    C,
    width,
    sequence_step,
    token_step,
    N: tl.constexpr,
    NP: tl.constexpr,
    OUT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    BELOW: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Adds to the sums ``[B, T, width]`` each block, times ``weights`` ``[width, CHUNKS CHUNK]`` (as of
    `rebuild`) or as it is; where there is nothing ``BELOW``, begins them. Sinks ``[B, S, width]`` replace
    the sum.

    Grid: columns of blocks, runs of OUT channels (of chunks, where not ``WEIGHTED``), sequences. Blocks come
    to the same numbers whatever others there are.
    """
    column, run, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at, each, begin = b * columns + column, tl.num_programs(2) * columns, tl.load(begins + column)
    token = lanes(N, NP)
    if WEIGHTED:
        channel = run * OUT + tl.arange(0, OUT)
        here = channel < width
        row = weights + channel.to(tl.int64)[None, :] * (CHUNKS * CHUNK)
        added = tl.zeros([NP, OUT], tl.float32)
        for chunk in range(CHUNKS):
            states = coded_chunk(
                blocks, each, at, chunk, token, C, N, NP, TILE, CHUNK, BITS, PER_TOKEN, SPAN, GROUP
            )  # fmt: skip
            place = row + (chunk * CHUNK + tl.arange(0, CHUNK))[:, None]
            added = tl.dot(states, tl.load(place, here[None, :], 0), added)
        added *= tl.load(units + channel, here, 0)[None, :] / SMALL
    else:
        chunks: tl.constexpr = (TILE + CHUNK - 1) // CHUNK
        channel = coded(TILE, CHUNK, BITS, CHUNK, run % chunks)
        here = channel >= 0
        channel += run // chunks * TILE
        added = coded_chunk(
            blocks, each, at, run, token, C, N, NP, TILE, CHUNK, BITS, PER_TOKEN, SPAN, GROUP
        ).to(tl.float32) / SMALL  # fmt: skip
    there = ((token >= 0) & (token < tl.load(lengths + column)))[:, None] & here[None, :]
    place = sums_in_out + b.to(tl.int64) * sequence_step + channel[None, :]
    place += (begin + token).to(tl.int64)[:, None] * token_step
    if BELOW:
        added += tl.load(place, there, 0).to(tl.float32)
    for s in range(sink_count):
        sink = b * sink_count + s
        found = tl.load(sink_at + sink) - begin
        exact = tl.load(sinks + sink * width + channel, here, 0).to(tl.float32)
        added = tl.where((token == found)[:, None] & (found >= 0), exact[None, :], added)
    tl.store(place, added.to(sums_in_out.dtype.element_ty), there)

"""The kernel that puts the newest tokens of an engine's sequences into their rings."""

import triton
import triton.language as tl

from .exact import run_of


@triton.jit
def append(key, value, rings, runs, W: tl.constexpr, WP: tl.constexpr, D: tl.constexpr):
    """Write the newest tokens behind those that the ring of their sequence holds. The reference is `append`
    in csrc/attention.h.

    Grid: sequences, new tokens of each.

    Args:
        key: `Heads` ``[T, G, 1, D]``, rotated; as ``value``.
        rings: `ExactRows` ``[M, R, 2 W]``, to write.
        runs: `Runs`.
        W: channels of the keys of a token, ``WP`` as a power of two, ``D`` of each head.
    """
    b, token = tl.program_id(0), tl.program_id(1)
    row, first, count, _ = run_of(runs.new, b, 0, 0, True)
    ring, start, held, _ = run_of(runs.tail, b, 0, 0, True)
    channel = tl.arange(0, WP)
    there = (channel < W) & (token < count)
    row = (row + first + token).to(tl.int64)
    head, within = channel // D, channel % D
    keys = key.data + row * key.token_stride + head * key.head_stride + within
    values = value.data + row * value.token_stride + head * value.head_stride + within
    place = ((start + held + token) % rings.capacity).to(tl.int64)
    to = rings.data + ring.to(tl.int64) * rings.batch_stride + place * rings.token_stride + channel
    dtype = rings.data.dtype.element_ty
    tl.store(to, tl.load(keys, there, 0).to(dtype), there)
    tl.store(to + W, tl.load(values, there, 0).to(dtype), there)

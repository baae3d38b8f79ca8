"""Arguments that kernels take in groups: a NamedTuple is one argument, whose fields Triton sees as scalars.

``data`` is what the kernel gets a pointer to. Triton compiles a kernel anew where a number in a group becomes
1 or a multiple of 16, or ceases to be: ``do_not_specialize`` does not reach into groups. So what changes from
step to step (the length, strides of the mask) is an argument of its own.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..block_table import Blocks as Blocks


class Heads(NamedTuple):
    """States of heads ``[B, heads, t, D]``; the channels of a head lie beside each other."""

    data: Any
    batch_stride: int
    head_stride: int
    token_stride: int

    @classmethod
    def of(cls, states: Tensor) -> "Heads":
        """``states`` ``[B, heads, t, D]``."""
        batch, head, token, _ = states.stride()
        return cls(states, batch, head, token)


class Rows(NamedTuple):
    """States of tokens ``[B, t, C]``; the channels of a token lie beside each other."""

    data: Any
    batch_stride: int
    token_stride: int


class ExactRows(NamedTuple):
    """Keys and values that are kept as they are, of the tail or of the sinks: rows ``[B, t, 2 G D]``, the
    keys of all heads before the values. Of an engine, the tail is rings ``[M, R, 2 G D]``, and sinks lie in
    slots."""

    data: Any
    batch_stride: int
    token_stride: int
    cos: Any
    """fp32 ``[B, t, D/2]``, as ``sin``: the rotation of the keys, where they are kept before RoPE."""
    sin: Any
    columns: Any
    """int32 ``[B, t]``, of sinks: where each stands among the tokens, -1 where it is not sealed yet."""
    capacity: int | None = None
    """Of a ring, ``R``; None for rows that have an end."""


class Pages(NamedTuple):
    """The pages of an engine's sequences."""

    addresses: Any
    """int64 ``[fields, 2]``: where the field lies in page 0, and how far pages lie apart."""
    table: Any
    """int32 ``[B, .]``: the page of every block."""
    table_stride: int


class BlockRope(NamedTuple):
    """The rotation ``R(p) R(r)`` of place ``r`` of a block that starts at position ``p``: see `RopeTable`."""

    start_cos: Any
    """fp32 ``[B, columns, D/2]``: ``R(p)``; of an engine's pages ``[columns, D/2]`` for all sequences."""
    start_sin: Any
    within_cos: Any
    """fp32 ``[n, D/2]``: ``R(r)``."""
    within_sin: Any


class Shape(NamedTuple):
    """How many rows a key/value head has: ``queries`` of each of its ``group_heads`` query heads."""

    queries: int
    group_heads: int
    kv_heads: int


class Matrix(NamedTuple):
    """A matrix that states are multiplied with: see `matrices.by_chunk`."""

    data: Any
    """fp16 or bf16 ``[M, CHUNKS * CHUNK]``."""
    units: Any
    """fp32 ``[M]``."""

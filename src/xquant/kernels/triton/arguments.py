"""Arguments that kernels take in groups: a NamedTuple is one argument, whose fields Triton sees as scalars.

``data`` is what the kernel gets a pointer to. Triton compiles a kernel anew where a number in a group becomes
1 or a multiple of 16, or ceases to be: ``do_not_specialize`` does not reach into groups. So what changes from
step to step (the length, strides of the mask) is an argument of its own.

Of a group in a group Triton 3.6 forgets, within a branch or a loop, which number a field is where it is a
constant (a one). It knows when the outer group is made anew, so kernels begin with that: ``Call(*call)``.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ...models.rotation import Pair
from ..addresses import Blocks as Blocks


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

    @classmethod
    def of_rows(cls, states: Tensor) -> "Heads":
        """``[T, heads, D]`` of all sequences of an engine, of which each has a run of rows."""
        token, head, _ = states.stride()
        return cls(states, token, head, token)


class Rows(NamedTuple):
    """States of tokens ``[B, t, C]``; the channels of a token lie beside each other."""

    data: Any
    batch_stride: int
    token_stride: int

    @classmethod
    def of(cls, rows: Tensor) -> "Rows":
        return cls(rows, *rows.stride()[:2])


class ExactRows(NamedTuple):
    """Keys and values that are kept as they are, of the tail or of the sinks: rows ``[B, t, 2 G D]``, the
    keys of all heads before the values. Of an engine, the tail is rings ``[M, R, 2 G D]``, and sinks lie in
    slots."""

    data: Any
    batch_stride: int
    token_stride: int
    cos: Any = None
    """fp32 ``[B, t, D/2]``, as ``sin``: the rotation of the keys, where they are kept before RoPE."""
    sin: Any = None
    columns: Any = None
    """int32 ``[B, t]``, of sinks of a cache: where each stands among the tokens, -1 where it is not sealed
    yet."""
    capacity: int | None = None
    """Of a ring, ``R``; None for rows that have an end."""

    @classmethod
    def of(cls, rows: Tensor) -> "ExactRows":
        """``rows`` ``[., t, 2 G D]``."""
        return cls(rows, *rows.stride()[:2])

    def rotated(self, angles: Pair) -> "ExactRows":
        """The same with the rotation of their keys."""
        return self._replace(cos=angles[0], sin=angles[1])


class Pages(NamedTuple):
    """The pages of an engine's sequences."""

    addresses: Any
    """int64 ``[fields, 2]``: where the field lies in page 0, and how far pages lie apart."""
    table: Any
    """int32 ``[B, .]``: the page of every block."""
    table_stride: int


class Runs(NamedTuple):
    """How many tokens an engine's sequences have, and where: see `paged.Sequences`."""

    limits: Any
    """int32 ``[B]``: tokens that are read from pages."""
    new: Any
    """int32 ``[B, 4]``, a `Run` of each sequence; as of the tail, and of sinks, which there need not be."""
    tail: Any
    sinks: Any


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


class Call(NamedTuple):
    """A call of attention: queries, the newest keys and values, and how scores are made."""

    query: Heads
    """``[B, H, t, D]``; of an engine rows of all sequences, ``[T, H, 1, D]``."""
    key: Heads
    """``[B, G, t, D]``, after RoPE; as the value."""
    value: Heads
    mask: Any
    """``[B, 1, t, T]``, bool or added to scores; or None."""
    mask_token_stride: int
    shape: Shape
    scaling: float
    softcap: float


class Memory(NamedTuple):
    """The past of the sequences of a cache, or of an engine."""

    blocks: Blocks | Pages
    tail: ExactRows
    sinks: ExactRows | None
    """None of an engine's method without sinks."""
    rope: BlockRope | None
    """Where keys are kept before RoPE."""
    runs: Runs | None = None
    """Of an engine's sequences. Those of a cache are of one length, which arguments of their own say."""


class Tables(NamedTuple):
    """What packed keys and values are decoded with."""

    key: Any
    """fp16 ``[2**bits]``, of codes that are numbers of levels; as of values."""
    value: Any
    offset: Any
    """fp32 ``[G D]``, the bias of keys, which their codes do without."""


class Matrix(NamedTuple):
    """A matrix that states are multiplied with: see `matrices.by_chunk`."""

    data: Any
    """fp16 or bf16 ``[M, CHUNKS * CHUNK]``."""
    units: Any
    """fp32 ``[M]``."""


class KeyWeights(NamedTuple):
    """What keys are made with from the rows in their place: see `jit.rebuild`."""

    matrix: Matrix
    """``[G D, C]``."""
    bias: Any
    """fp32 ``[G D]``."""
    gain: Any
    """fp32 ``[D]``, of the norm; as its epsilon."""
    epsilon: float

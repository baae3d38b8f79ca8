"""Launch: the arguments that every launch of one attention call shares."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...models.rotation import Pair
from ..call import AttentionCall
from ..rope import RopeTable
from ..splits import blocks_per_split
from .arguments import BlockRope, ExactRows, Heads, Shape
from .jit.softmax import ADDED, BOOLS, NONE
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

LEAST_ROWS = 4
MOST_ROWS = 64
"""Rows of one program: query heads times queries of a key/value head."""
MOST_SUMS = 1 << 12
"""Rows times channels of one program."""


def splits_of(columns: int, programs: int, slots: int) -> int:
    """How many splits `attend` has: the first for what is kept exactly, the others for the blocks."""
    return 1 + -(-columns // blocks_per_split(columns, programs, slots))


def padded_rows(rows: int) -> int:
    """Of a program that keeps no sums, where a key/value head has so many."""
    return min(max(power(rows), 8), MOST_ROWS)


def program_rows(rows: int, size: int) -> int:
    """Of a program that keeps sums of values, in heads of ``size`` channels."""
    return min(max(power(rows), LEAST_ROWS), MOST_SUMS // power(size))


class Launch(NamedTuple):
    """The newest tokens, and how many there are before them."""

    query: Tensor
    """``[B, H, t, D]``, the channels of a head beside each other, as in keys and values."""
    key: Tensor
    """``[B, G, t, D]``, as the values."""
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float
    sink_logits: Tensor | None  # fp32 [H]
    past: int
    """Tokens before the newest."""
    limit: int
    """Of them, those in blocks."""
    before: int
    """Of them, those in the tail."""
    start: Pair
    """The rotations of `RopeAngles`; empty where keys are kept after RoPE."""
    within: Pair
    tail: Pair
    sinks: Pair

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.key.shape[1]

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.query.shape[3]

    @property
    def shape(self) -> Shape:
        heads, queries = self.query.shape[1:3]
        return Shape(queries, heads // self.groups, self.groups)

    @property
    def rows(self) -> int:
        """Query heads times queries of a key/value head."""
        return self.query.shape[1] * self.query.shape[2] // self.groups

    @property
    def padded_rows(self) -> int:
        """Rows of a program that keeps no sums."""
        return padded_rows(self.rows)

    @property
    def program_rows(self) -> int:
        """Rows of a program that keeps sums of values."""
        return program_rows(self.rows, self.size)

    @property
    def row_programs(self) -> int:
        """Programs for all rows of a key/value head."""
        return -(-self.rows // self.program_rows)

    def new_out(self) -> Tensor:
        """``[B, t, H, D]``, not written yet."""
        return torch.empty_like(self.query.transpose(1, 2), memory_format=torch.contiguous_format)

    # -- as the kernels take them --------------------------------------------------------------

    @property
    def heads(self) -> tuple[Heads, Heads, Heads]:
        """Query, key and value."""
        return Heads.of(self.query), Heads.of(self.key), Heads.of(self.value)

    @property
    def rope(self) -> BlockRope:
        return BlockRope(*self.start, *self.within)

    def exact_rows(
        self, tail: Tensor, sinks: Tensor, columns: Tensor
    ) -> tuple[ExactRows, ExactRows]:
        """Tail and sinks ``[B, ., 2 G D]``, the sinks in ``columns`` ``[B, S]``; anything of one dimension
        stands for rows that are not there."""
        return (
            ExactRows(tail, *row_strides(tail), *self.tail, columns),
            ExactRows(sinks, *row_strides(sinks), *self.sinks, columns),
        )

    def mask_arguments(self, nothing: Tensor) -> tuple[Tensor, int, int, int]:
        """The mask, or ``nothing`` in its place, and its strides of sequences, queries and tokens; 0 where
        there is one for all."""
        if self.mask is None:
            return nothing, 0, 0, 0
        sizes = zip(self.mask.stride(), self.mask.shape, strict=True)
        batch, _, query, token = (stride if size > 1 else 0 for stride, size in sizes)
        return self.mask, batch, query, token

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        mask = NONE
        if self.mask is not None:
            mask = BOOLS if self.mask.dtype == torch.bool else ADDED
        return {"MASK": mask.value, "SOFTCAP": bool(self.softcap)}


def row_strides(rows: Tensor) -> tuple[int, int]:
    """Strides of sequences and tokens of rows ``[B, t, C]``; (1, 0) where there are none."""
    batch, token = (*rows.stride()[:2], 0)[:2]
    return batch, token


def sink_columns(layer: "CompressedLayer", nowhere: Tensor) -> tuple[Tensor, int]:
    """The columns of a layer's sinks, int32 ``[B, S]``, and ``S``; ``nowhere`` and 0 where it has none."""
    if layer.sinks is None:
        return nowhere, 0
    columns = layer.sinks.columns
    return columns, columns.shape[1]


def launch_of(layer: "CompressedLayer", call: AttentionCall, rope: RopeTable) -> Launch | None:
    """What the launches for ``call`` share; None where no kernel can answer it."""
    query, key, value, mask, scaling, softcap, sink_logits = call
    if not call.is_plain:
        return None
    stream, device = layer.stream, layer.codec.view.device
    if layer.source is not None and layer.source.codec.view.device != device:
        return None
    past = layer.tokens - query.shape[2]
    limit = min(stream.tokens, past)
    before = past - limit
    if layer.codec.rotated:
        nothing = torch.empty(0, device=device)
        pairs = [(nothing, nothing)] * 4
    else:
        columns = None if layer.sinks is None else layer.sinks.columns
        angles = rope.of(stream.lengths, stream.block, before, columns)
        if angles is None:
            return None
        rotations = angles.start, angles.within.angles, angles.tail, angles.sinks
        pairs = [(cos.to(device), sin.to(device)) for cos, sin in rotations]
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    cap = softcap or 0.0
    return Launch(query, key, value, mask, scaling, cap, sink_logits, past, limit, before, *pairs)

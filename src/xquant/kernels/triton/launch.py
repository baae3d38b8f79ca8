"""What the launches for one call share: the call, and the past that it reads."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..addresses import BlockTable
from ..call import mask_strides
from ..packed_call import PackedCall
from ..splits import blocks_per_split
from .arguments import BlockRope, Call, ExactRows, Heads, Memory, Shape
from .jit.softmax import ADDED, BOOLS, NONE
from .support import power

LEAST_ROWS = 4
MOST_ROWS = 64
"""Rows of one program: query heads times queries of a key/value head."""
MOST_SUMS = 1 << 12
"""Rows times channels of one program."""


def splits_of(columns: int, programs: int, slots: int) -> int:
    """How many splits `attend` has: the first for what is kept exactly, the others for the blocks."""
    return 1 + -(-columns // blocks_per_split(columns, programs, slots))


class Launch(NamedTuple):
    """A call, and what else the kernels ask of it."""

    call: Call
    out: Heads
    """``[B, H, t, D]``, to write; of an engine rows of all sequences."""
    batch: int
    size: int
    """Channels of a head."""
    mask_strides: Sequence[int] = (0, 0)
    """Of sequences and queries."""
    sink_logits: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedCall, out: Tensor) -> "Launch":
        """``out``: ``[B, t, H, D]``."""
        batch, heads, queries, size = packed.query.shape
        groups, (*strides, token_stride) = packed.key.shape[1], mask_strides(packed.mask)
        query, key, value = map(Heads.of, (packed.query, packed.key, packed.value))
        shape = Shape(queries, heads // groups, groups)
        scores = packed.mask, token_stride, shape, packed.scaling, packed.softcap
        call, heads_out = Call(query, key, value, *scores), Heads.of(out.transpose(1, 2))
        return cls(call, heads_out, batch, size, strides, packed.sink_logits)

    @property
    def rows(self) -> int:
        """Query heads times queries of a key/value head."""
        return self.call.shape.queries * self.call.shape.group_heads

    @property
    def heads(self) -> int:
        """Key/value heads of all sequences."""
        return self.batch * self.call.shape.kv_heads

    @property
    def padded_rows(self) -> int:
        """Rows of a program that keeps no sums."""
        return min(max(power(self.rows), 8), MOST_ROWS)

    @property
    def program_rows(self) -> int:
        """Rows of a program that keeps sums of values."""
        return min(max(power(self.rows), LEAST_ROWS), MOST_SUMS // power(self.size))

    @property
    def row_programs(self) -> int:
        """Programs for all rows of a key/value head."""
        return -(-self.rows // self.program_rows)

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        mask, kind = self.call.mask, NONE
        if mask is not None:
            kind = BOOLS if mask.dtype == torch.bool else ADDED
        return {"MASK": kind.value, "SOFTCAP": bool(self.call.softcap)}


class Past(NamedTuple):
    """The memory that a call reads, and how much of it."""

    memory: Memory
    columns: int
    """The most blocks of a sequence."""
    sinks: int
    """The most of a sequence."""
    limit: int | None = None
    """Tokens in blocks of every sequence; None where memory says, as those in the tail."""
    tail: int | None = None

    @property
    def counts(self) -> tuple[int | None, ...]:
        """Of every sequence: blocks, and tokens in blocks, in the tail and sinks; None where memory says."""
        if self.memory.runs is not None:
            return None, None, None, None
        return self.columns, self.limit, self.tail, self.sinks

    @classmethod
    def of_cache(
        cls,
        packed: PackedCall,
        table: BlockTable,
        tail: Tensor,
        sinks: tuple[Tensor, Tensor] | None,
    ) -> "Past":
        """``tail``: ``[B, ., 2 G D]``; ``sinks``: rows alike, and their columns int32 ``[B, S]``."""
        rope, exact_tail = None, ExactRows.of(tail)
        # Without sinks, none of other rows: a kernel without code for them takes more registers.
        exact_sinks, count = exact_tail._replace(columns=table.blocks.begins), 0
        if sinks is not None:
            rows, columns = sinks
            exact_sinks, count = ExactRows.of(rows)._replace(columns=columns), columns.shape[1]
        if (angles := packed.angles) is not None:
            rope = BlockRope(*angles.start, *angles.within)
            exact_tail, exact_sinks = (
                exact_tail.rotated(angles.tail),
                exact_sinks.rotated(angles.sinks),
            )
        memory = Memory(table.blocks, exact_tail, exact_sinks, rope)
        return cls(memory, table.columns, count, packed.limit, packed.before)

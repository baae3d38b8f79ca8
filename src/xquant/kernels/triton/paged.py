"""Attention over an engine's pages by Triton: the same kernels as in `attention`.

Lengths, tables, and where rings and new tokens lie are read in the device's memory. So the host need not know
them, and a CUDA graph of a call holds for every step of as many sequences: what it launches depends on their
number, on how many new tokens each has, and on the width of the table, the longest that the engine allows.
"""

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...store.pages import PageLayout
from ..block_table import FIELDS
from ..paged import PagedAngles, PagedAttention, Sequences
from .arguments import BlockRope, ExactRows, Heads, Pages, Shape
from .attention import PackedHeads
from .device import Slots, start
from .jit.append import append
from .jit.attend import attend
from .jit.combine import combine
from .jit.softmax import NONE
from .launch import program_rows, row_strides, splits_of
from .support import power


class TritonPages(PagedAttention):
    """Attends over one layer of packed keys and values.

    Args:
        scaling, softcap: of scores; softcap 0 for none.
        angles: needed where the codec keeps keys before RoPE.
    """

    def __init__(
        self,
        codec: LayerCodec,
        layout: PageLayout,
        scaling: float,
        softcap: float,
        angles: PagedAngles | None,
    ) -> None:
        view = codec.view
        self._layout, self._packed = layout, PackedHeads(codec, layout.block)
        self._scaling, self._softcap = scaling, softcap
        self._device, self._size, self._kv_heads = view.device, view.head_size, view.kv_heads
        self._slots = Slots(attend, view.device)
        nothing = self._packed.nothing
        self._rope = BlockRope(*[nothing] * 4)
        if not codec.rotated:
            assert angles is not None
            pairs = (*angles.starts, *angles.within.angles)
            self._rope = BlockRope(*(t.to(self._device).contiguous() for t in pairs))

    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        # Where each field lies in page 0, and how far pages lie apart: not at all where they share it.
        found = [[[0, 0] for _ in FIELDS] for _ in self._packed.operands]
        for place in self._layout.places:
            start = pages.data_ptr() + place.start
            found[place.segment][FIELDS.index(place.name)] = [start, pages.stride(0)]
        for fields, operand in zip(found, self._packed.operands, strict=True):
            for name, shared in zip(("scale", "zero"), operand.offline or (), strict=False):
                fields[FIELDS.index(name)] = [shared.data_ptr(), 0]
        self._addresses = torch.tensor(found, dtype=torch.int64, device=self._device)
        self._rings, self._sinks = rings, sinks

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, out: Tensor
    ) -> None:
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        assert out.stride(-1) == 1
        limits, table, size = sequences.limits, sequences.table, self._size
        shape = Shape(sequences.queries, query.shape[1] // self._kv_heads, self._kv_heads)
        rows, heads = shape.queries * shape.group_heads, len(limits) * shape.kv_heads
        of_program, nothing = program_rows(rows, size), self._packed.nothing
        row_programs = -(-rows // of_program)
        rings = self._exact(self._rings, self._rings.shape[1])
        sinks = None if sequences.sinks is None else self._exact(self._sinks, None)
        given = (
            *(_rows_of(states) for states in (query, key, value)),
            rings,
            sinks,
            *(nothing, 0, 0, 0),
            Pages(self._addresses, table, table.stride(0)),
            self._rope,
            *self._packed.tables,
        )
        numbers = (
            0,
            limits,
            sequences.new,
            sequences.held,
            sequences.sinks,
            shape,
            self._scaling,
            self._softcap,
        )
        constants = {
            "ROWS": of_program,
            "SINKS": 0 if sequences.sinks is None else power(sequences.sink),
            "PAGED": True,
            "MASK": NONE.value,
            "SOFTCAP": bool(self._softcap),
            **self._packed.constants,
        }
        slots = self._slots.of(*given, nothing, nothing, *numbers, **constants)
        splits = splits_of(table.shape[1], heads * row_programs, slots)
        # Of torch's allocator, which gives a CUDA graph memory that stays its own.
        sums = torch.empty(splits * heads * rows * size, device=self._device, dtype=torch.float32)
        maxima = torch.empty(splits * heads * rows * 2, device=self._device, dtype=torch.float32)
        grid = splits, heads, row_programs
        start(attend, grid, self._device, *given, sums, maxima, *numbers, **constants)
        start(
            combine,
            (rows, heads, 1),
            self._device,
            sums,
            maxima,
            _rows_of(out),
            maxima,
            None,
            splits,
            limits,
            sequences.new,
            shape,
            D=size,
            DP=power(size),
            N=sequences.block,
            PARTIAL=False,
        )
        width = shape.kv_heads * size
        start(
            append,
            (len(limits), shape.queries),
            self._device,
            _rows_of(key),
            _rows_of(value),
            rings,
            sequences.new,
            sequences.held,
            W=width,
            WP=power(width),
            D=size,
        )

    def _exact(self, rows: Tensor, capacity: int | None) -> ExactRows:
        nothing = self._packed.nothing  # no angles, and no columns
        return ExactRows(rows, *row_strides(rows), nothing, nothing, nothing, capacity)


def _rows_of(states: Tensor) -> Heads:
    """States ``[T, heads, D]``, in which a sequence has the rows from one on."""
    token, head, _ = states.stride()
    return Heads(states, token, head, token)

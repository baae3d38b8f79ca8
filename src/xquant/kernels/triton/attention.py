"""Attention over packed keys and values by Triton: jit/attend.py and jit/combine.py.

``softmax(Q K^T) V`` with keys and values decoded from their codes in registers, split over programs, whose
results are combined by a second launch. It equals attention over `CompressedLayer.read`.

A cache and an engine differ in where blocks lie, and in who knows how many there are. Of a cache the host
does. Of an engine lengths, tables, and where rings and new tokens lie are read in the device's memory. So a
CUDA graph of a call holds for every step of as many sequences: what it launches depends on their number, on
how many new tokens each has, and on the width of the table, the longest that the engine allows.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...past.angles import PagedAngles
from ...past.pages import PageLayout
from ...past.sequences import Sequences
from ..addresses import page_addresses
from ..backend import Shared
from ..call import AttentionCall
from ..packed_call import GpuAttention, PackedCall, channels_together
from ..paged import PagedAttention
from ..workspace import Unshared, Workspace
from .arguments import BlockRope, Call, ExactRows, Heads, Memory, Pages, Runs, Shape, Tables
from .device import Slots, start
from .jit.append import append
from .jit.attend import attend
from .jit.combine import combine
from .launch import Launch, Past, splits_of
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer

WIDE = 1 << 14
"""Elements of a block and head from which on a program has twice as many warps: its registers would spill."""


class PackedKernel:
    """The packed keys and values of a layer, and the launches that attend to them wherever they lie.

    Args:
        block: tokens of a block.
    """

    def __init__(self, codec: LayerCodec, block: int) -> None:
        view = codec.view
        self.device, self.block = view.device, block
        self.operands = [
            KernelOperand.of(segment, block, view.head_size, view.device) for segment in codec.segments
        ]
        keys, values = self.operands
        self._nothing = torch.zeros(1, device=view.device, dtype=torch.float32)
        offset = None if codec.offset is None else codec.offset.float().contiguous()
        tables = (keys.levels, values.levels, offset)
        self._tables = Tables(*(self._nothing if t is None else t for t in tables))
        # On an H200 eight warps are a fifth faster before RoPE, and four by 6 to 17% after it.
        many = power(view.head_size) * power(block) >= WIDE and not codec.rotated
        self.constants = {
            "D": view.head_size,
            "DP": power(view.head_size),
            "N": block,
            "NP": power(block),
            "ROTATE": not codec.rotated,
            "OFFSET": offset is not None,
            "KEY": keys.layout,
            "VALUE": values.layout,
            "num_warps": 8 if many else 4,
        }
        self.slots = Slots(attend, view.device)

    @property
    def offline(self) -> list[tuple[Tensor, Tensor] | None]:
        """Scale and zero of keys and of values, where all blocks share them."""
        return [operand.offline for operand in self.operands]

    def attend(self, launch: Launch, past: Past, workspace: Workspace) -> None:
        """Write the output of a call."""
        runs = past.memory.runs
        given = launch.call, *launch.mask_strides, past.memory, *past.counts, self._tables
        constants = {
            "ROWS": launch.program_rows,
            "SINKS": past.sinks and power(past.sinks),
            "PAGED": runs is not None,
            **launch.constants,
            **self.constants,
        }
        slots = self.slots.of(*given, self._nothing, self._nothing, **constants)
        splits = splits_of(past.columns, launch.heads * launch.row_programs, slots)
        rows = splits * launch.heads * launch.rows
        sums, maxima = workspace.take(self.device, rows * launch.size, rows * 2)
        grid = splits, launch.heads, launch.row_programs
        start(attend, grid, self.device, *given, sums, maxima, **constants)
        combine_splits(sums, maxima, splits, launch, runs, self.block)


def combine_splits(
    sums: Tensor,
    maxima: Tensor,
    splits: int,
    launch: Launch,
    runs: Runs | None = None,
    block: int | None = None,
) -> None:
    """Write the output: the combination of ``splits`` of every row, or as many as sequences have blocks for
    by their ``runs``."""
    start(
        combine,
        (launch.rows, launch.heads, 1),
        sums.device,
        sums,
        maxima,
        launch.out,
        maxima,
        launch.sink_logits,
        splits,
        runs,
        launch.call.shape,
        D=launch.size,
        DP=power(launch.size),
        N=None if runs is None else block,
        PARTIAL=False,
    )


class TritonAttention(GpuAttention):
    """Attends over one layer of a cache."""

    def __init__(self, layer: "CompressedLayer", shared: Shared) -> None:
        self._packed = PackedKernel(layer.codec, layer.stream.block)
        super().__init__(layer, shared, self._packed.offline)

    def _answer(self, packed: PackedCall, out: Tensor) -> None:
        layer = self._layer
        assert layer.tail is not None
        sinks = None if layer.sinks is None else (layer.sinks.rows, layer.sinks.columns)
        past = Past.of_cache(packed, self._table, layer.tail, sinks)
        self._packed.attend(Launch.of(packed, out), past, self._workspace)


class TritonPages(PagedAttention):
    """Attends over one layer in an engine's pages.

    Args:
        angles: needed where the codec keeps keys before RoPE.
    """

    def __init__(self, codec: LayerCodec, layout: PageLayout, angles: PagedAngles | None) -> None:
        self._layout, self._packed = layout, PackedKernel(codec, layout.block)
        self._size, self._kv_heads = codec.view.head_size, codec.view.kv_heads
        self._rope: BlockRope | None = None
        if not codec.rotated:
            assert angles is not None
            self._rope = BlockRope(*angles.of_blocks(codec.view.device))

    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        self._addresses = page_addresses(self._layout, pages, self._packed.offline)
        self._rings = ExactRows.of(rings)._replace(capacity=rings.shape[1])
        self._sinks = ExactRows.of(sinks)

    def attend(self, call: AttentionCall, sequences: Sequences, out: Tensor) -> None:
        assert out.stride(-1) == 1
        query, key, value = channels_together(*call[:3])
        table, groups, size = sequences.table, self._kv_heads, self._size
        shape = Shape(sequences.queries, query.shape[1] // groups, groups)
        states = Heads.of_rows(query), Heads.of_rows(key), Heads.of_rows(value)
        given = Call(*states, None, 0, shape, call.scaling, call.softcap or 0.0)
        runs = Runs(sequences.limits, sequences.new, sequences.held, sequences.sinks)
        pages = Pages(self._addresses, table, table.stride(0))
        sinks, count = (None, 0) if sequences.sinks is None else (self._sinks, sequences.sink)
        memory = Memory(pages, self._rings, sinks, self._rope, runs)
        batch, logits = len(sequences.limits), call.float_logits
        launch = Launch(given, Heads.of_rows(out), batch, size, sink_logits=logits)
        self._packed.attend(launch, Past(memory, table.shape[1], count), Unshared())
        start(
            append,
            (launch.batch, sequences.queries),
            query.device,
            given.key,
            given.value,
            self._rings,
            runs,
            W=groups * size,
            WP=power(groups * size),
            D=size,
        )

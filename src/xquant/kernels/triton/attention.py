"""Attention over packed keys and values by Triton: jit/attend.py and jit/combine.py.

``softmax(Q K^T) V`` with keys and values decoded from their codes in registers, split over programs, whose
results are combined by a second launch. It equals attention over `CompressedLayer.read`.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ..backend import LayerAttention
from ..block_table import BlockTable
from ..call import AttentionCall
from ..rope import RopeTable
from ..workspace import Workspace
from .arguments import Heads
from .device import Slots, start
from .jit.attend import attend
from .jit.combine import combine
from .launch import Launch, launch_of, sink_columns, splits_of
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

WIDE = 1 << 14
"""Elements of a block and head from which on a program has twice as many warps: its registers would spill."""


class PackedHeads:
    """How a layer's keys and values are packed, as the kernel takes it.

    Args:
        block: tokens of a block.
    """

    def __init__(self, codec: LayerCodec, block: int) -> None:
        view = codec.view
        self.operands = [
            KernelOperand.of(segment, block, view.head_size, view.device)
            for segment in codec.segments
        ]
        keys, values = self.operands
        self.nothing = torch.zeros(1, device=view.device, dtype=torch.float32)
        """In place of what a layer has not."""
        offset = None if codec.offset is None else codec.offset.float().contiguous()
        self.tables = [
            self.nothing if t is None else t for t in (keys.levels, values.levels, offset)
        ]
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


class TritonAttention(LayerAttention):
    """Attends over one layer."""

    def __init__(self, layer: "CompressedLayer", rope: RopeTable, workspace: Workspace) -> None:
        self._layer, self._rope, self._workspace = layer, rope, workspace
        self._packed = PackedHeads(layer.codec, layer.stream.block)
        offline = [operand.offline for operand in self._packed.operands]
        self._table = BlockTable(layer.stream, offline, layer.codec.view.device)
        self._slots = Slots(attend, layer.codec.view.device)

    def attend(self, call: AttentionCall) -> Tensor | None:
        """See `LayerAttention.attend`. Asks the device for nothing while no block is sealed."""
        launch = launch_of(self._layer, call, self._rope)
        if launch is None:
            return None
        table, layer, nothing = self._table, self._layer, self._packed.nothing
        table.refresh()
        device, heads = launch.query.device, launch.batch * launch.groups
        tail = nothing if layer.tail is None else layer.tail
        sinks = nothing if layer.sinks is None else layer.sinks.rows
        columns, sink_count = sink_columns(layer, table.blocks.begins)
        given = (
            *launch.heads,
            *launch.exact_rows(tail, sinks, columns),
            *launch.mask_arguments(nothing),
            table.blocks,
            launch.rope,
            *self._packed.tables,
        )
        numbers = (
            table.columns,
            launch.limit,
            launch.past,
            launch.before,
            sink_count,
            launch.shape,
            launch.scaling,
            launch.softcap,
        )
        constants = {
            "ROWS": launch.program_rows,
            "SINKS": sink_count and power(sink_count),
            "PAGED": False,
            **launch.constants,
            **self._packed.constants,
        }
        slots = self._slots.of(*given, nothing, nothing, *numbers, **constants)
        splits = splits_of(table.columns, heads * launch.row_programs, slots)
        rows = heads * splits * launch.rows
        sums, maxima = self._workspace.take(device, rows * launch.size, rows * 2)
        grid = splits, heads, launch.row_programs
        start(attend, grid, device, *given, sums, maxima, *numbers, **constants)
        out = launch.new_out()
        combine_splits(sums, maxima, splits, launch, out)
        return out


def combine_splits(sums: Tensor, maxima: Tensor, splits: int, launch: Launch, out: Tensor) -> None:
    """Write to ``out`` ``[B, t, H, D]`` the combination of ``splits`` of every row."""
    start(
        combine,
        (launch.rows, launch.batch * launch.groups, 1),
        out.device,
        sums,
        maxima,
        Heads.of(out.transpose(1, 2)),
        maxima,
        launch.sink_logits,
        splits,
        None,
        None,
        launch.shape,
        D=launch.size,
        DP=power(launch.size),
        N=None,
        PARTIAL=False,
    )

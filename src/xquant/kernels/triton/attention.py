"""Attention over packed keys and values by Triton: one layer's side of the kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backend import LayerAttention
from ..call import AttentionCall
from ..rope import RopeTable
from ..workspace import Workspace
from .block_table import BlockTable
from .jit.attend import attend
from .jit.combine import combine
from .launch import Launch, blocks_per_split, launch_of
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

WIDE = 1 << 14
"""Elements of a block and head from which on a program that turns keys has twice as many warps: its
registers would spill."""


class TritonAttention(LayerAttention):
    """Attends over one layer."""

    def __init__(self, layer: "CompressedLayer", rope: RopeTable, workspace: Workspace) -> None:
        self._layer, self._rope, self._workspace = layer, rope, workspace
        view, block = layer.codec.view, layer.stream.block
        operands = [
            KernelOperand.of(s, block, view.head_size, view.device) for s in layer.codec.segments
        ]
        self._table = BlockTable(layer.stream, operands, view.device)
        self._nothing = torch.zeros(1, device=view.device)  # in place of what a layer has not
        offset = layer.codec.offset
        offset = None if offset is None else offset.float().contiguous()
        self._given = [
            self._nothing if t is None else t for t in (*(o.levels for o in operands), offset)
        ]
        elements = power(view.head_size) * power(block)
        self._constants = {
            "D": view.head_size,
            "DP": power(view.head_size),
            "N": block,
            "NP": power(block),
            "TURN": not layer.codec.rotated,
            "OFFSET": offset is not None,
            "num_warps": 8 if elements >= WIDE and not layer.codec.rotated else 4,
            **operands[0].constants("KEY"),
            **operands[1].constants("VALUE"),
        }

    def attend(self, call: AttentionCall) -> Tensor | None:
        """See `LayerAttention.attend`. Asks the device for nothing while no block is sealed."""
        found = launch_of(self._layer, call, self._rope)
        if found is None:
            return None
        table, nothing = self._table, self._nothing
        table.refresh()
        query, batch, groups, rows = found.query, found.batch, found.groups, found.rows
        share = blocks_per_split(table.columns, batch * groups * found.runs, query.device)
        # One split has what is kept exactly, the others blocks.
        splits = 1 + -(-table.columns // share)
        many = batch * groups * splits * rows
        sums, maxima = self._workspace.take(query.device, many * found.size, many * 2)
        tail, sinks, sink_at = exact_rows(self._layer, nothing, table.begins)
        sink_count = sinks.shape[1] if sinks.dim() > 1 else 0
        out = found.new_out()
        attend[(splits, batch * groups, found.runs)](
            query,
            found.key,
            found.value,
            tail,
            sinks,
            sink_at,
            nothing if found.mask is None else found.mask,
            sums,
            maxima,
            table.addresses,
            table.begins,
            table.lengths,
            *found.start,
            *found.within,
            *found.tail,
            *found.sinks,
            *self._given,
            table.columns,
            share,
            found.limit,
            found.past,
            found.before,
            sink_count,
            found.queries,
            found.group_heads,
            groups,
            *query.stride()[:3],
            *found.key.stride()[:3],
            *found.value.stride()[:3],
            *steps(tail),
            *steps(sinks),
            *found.mask_steps,
            found.scaling,
            found.softcap,
            ROWS=found.each,
            SINKS=sink_count and power(sink_count),
            **found.constants,
            **self._constants,
        )
        combine_splits(sums, maxima, splits, found, out)
        return out


def combine_splits(sums: Tensor, maxima: Tensor, splits: int, found: Launch, out: Tensor) -> None:
    """Write to ``out`` ``[B, t, H, D]`` the combination of ``splits`` of every row."""
    combine[(found.rows, found.batch * found.groups, 1)](
        sums,
        maxima,
        out,
        splits,
        found.queries,
        found.group_heads,
        found.groups,
        *out.stride()[:3],
        maxima,
        D=found.size,
        DP=power(found.size),
        OPEN=False,
    )


def exact_rows(
    layer: "CompressedLayer", nothing: Tensor, nowhere: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tail and sinks ``[B, ., W]`` of a layer, the columns of sinks ``[B, S]``; or what stands for them."""
    tail = nothing if layer.tail is None else layer.tail
    if layer.sinks is None:
        return tail, nothing, nowhere
    return tail, layer.sinks.rows, layer.sinks.columns


def steps(rows: Tensor) -> list[int]:
    """Strides of sequences and tokens; 0 where there are no rows."""
    return [*rows.stride()[:2], 0][:2]

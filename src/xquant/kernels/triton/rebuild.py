"""Attention over keys that are rebuilt from packed rows, by Triton: jit/rebuild.py and jit/sum_states.py.

Keys are rebuilt and scored block by block. Values: see `rebuilding`. It equals attention over
`CompressedLayer.read`.
"""

from math import gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...quant.operand import Operand
from ..backend import LayerAttention
from ..block_table import BlockTable
from ..call import AttentionCall
from ..rebuilding import recalled_rows
from ..rope import RopeTable
from ..splits import blocks_per_split
from ..workspace import Workspace
from .arguments import Heads, Matrix, Rows, Shape
from .attention import combine_splits
from .device import Slots, start
from .jit.attend_exact import attend_exact
from .jit.combine import combine
from .jit.rebuild import rebuild
from .jit.sum_states import CHANNEL_LANES, PLAIN, TOKEN_LANES, sum_states
from .launch import Launch, launch_of, row_strides, sink_columns
from .matrices import CHUNK, PackedStates, by_chunk
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

MOST_SUMMED = 128
"""Channels that a program sums."""
MOST_PAIRED = 128
"""Channels of a head up to which a program rebuilds two heads."""
SUM_ROWS = 32
"""Rows of a program that sums: query heads times queries."""
COMBINED = 256
"""Channels that a program combines."""


class TritonRebuilding(LayerAttention):
    """Attends over one layer."""

    def __init__(self, layer: "CompressedLayer", rope: RopeTable, workspace: Workspace) -> None:
        self._layer, self._rope, self._workspace = layer, rope, workspace
        codec, block = layer.codec.rematerialized, layer.stream.block
        assert codec is not None
        view = codec.view
        self._codec, self._device = codec, view.device
        self._nothing = torch.zeros(1, device=view.device, dtype=torch.float32)
        # Of the type of rows that are there: for others a kernel would be another.
        self._no_rows = torch.zeros(1, 0, 2 * view.kv_width, dtype=view.dtype, device=view.device)
        bias = codec.key_bias
        self._bias = self._nothing if bias is None else bias.float().contiguous()
        pairs = view.kv_heads % 2 == 0 and power(view.head_size) <= MOST_PAIRED
        self._program_heads = 2 if pairs else 1
        self._block_constants = {"N": block, "NP": power(block), "num_warps": 8}
        self._key_constants: dict[str, Any] = {
            "D": view.head_size,
            "DP": power(view.head_size),
            "HEADS": self._program_heads,
            **self._block_constants,
        }
        self._prepare()

    def _prepare(self) -> None:
        """What depends on how rows are packed."""
        codec, view, block = self._codec, self._codec.view, self._layer.stream.block
        operands = [KernelOperand.of(s, block, s.channels, view.device) for s in codec.segments]
        offline = [operand.offline for operand in operands]
        self._table = BlockTable(self._layer.stream, offline, view.device)
        self._accumulated = codec.sums_deltas
        states = None
        if not self._accumulated:
            states = PackedStates.of(codec.segments[0], block, view.device)
        if "triton keys" not in codec.prepared:
            codec.prepared["triton keys"] = list(by_chunk(codec.key_weight, states))
        self._matrix = Matrix(*codec.prepared["triton keys"])
        norm = None if view.key_norm is None else view.key_gain()
        self._gain, self._epsilon = norm or (self._nothing, 0.0)
        plain = {"TILE": None, "LAYOUT": None, "CHUNK": CHUNK}
        packed = plain if states is None else states.constants()
        chunk = CHUNK if states is None else states.chunk
        self._key_constants |= {
            "CHUNKS": self._matrix.data.shape[1] // chunk,
            "PACKED": states is not None,
            "BIAS": codec.key_bias is not None,
            "NORM": norm is not None,
            **packed,
        }
        self._sum_constants = {"ROWS": SUM_ROWS, **self._block_constants, **self._summed()}
        self._slots = Slots(sum_states, view.device)

    def _summed(self) -> dict[str, Any]:
        """What `sum_states` is compiled for: which channels a program sums, and how they are packed."""
        codec, block = self._codec, self._layer.stream.block
        if self._accumulated:
            size = min(MOST_SUMMED, power(codec.value_weight.shape[1]))
            return {"SOURCE": PLAIN.value, "D": size, "DP": size, "LAYOUT": None}
        segment = codec.segments[-1]
        operand = segment.operand(block)
        assert isinstance(operand, Operand) and operand.tile is not None
        by_token = operand.tile.lanes == "tokens"
        size = operand.tile.head if by_token else gcd(operand.group, MOST_SUMMED)
        return {
            "SOURCE": (TOKEN_LANES if by_token else CHANNEL_LANES).value,
            "D": size,
            "DP": power(size),
            "LAYOUT": KernelOperand.of(segment, block, size, self._device).layout,
        }

    def attend(self, call: AttentionCall) -> Tensor | None:
        """See `LayerAttention.attend`. Asks the device for nothing while no block is sealed."""
        launch = launch_of(self._layer, call, self._rope)
        if launch is None:
            return None
        self._table.refresh()
        rows, size = launch.batch * launch.groups * launch.rows, launch.size
        channels, columns = self._codec.value_weight.shape[1], self._table.columns
        source = self._source() if columns else None
        per_split = self._blocks_per_split(launch, source) if columns else 1
        splits = -(-columns // per_split)
        # Of the last combination, the exact tokens are one split, all blocks are the other.
        sums, maxima, scores, *coded = self._workspace.take(
            self._device,
            2 * rows * size,
            2 * rows * 2,
            rows * columns * self._layer.stream.block,
            splits * rows * channels,
            splits * rows * 2,
        )
        self._attend_exact(launch, sums, maxima)
        if columns:
            self._score(launch, source, scores)
            self._sum(launch, source, scores, per_split, coded)
            values = self._project(launch, coded, splits, maxima[2 * rows :])
            sums[rows * size : 2 * rows * size].view_as(values).copy_(values)
        out = launch.new_out()
        combine_splits(sums, maxima, 1 + (columns > 0), launch, out)
        if self._layer.below is not None:
            self._layer.below.release()
        return out

    def _attend_exact(self, launch: Launch, sums: Tensor, maxima: Tensor) -> None:
        """Attend to what is kept exactly; its keys and values are projected as the model does."""
        layer, tail, sinks = self._layer, self._no_rows, self._no_rows
        columns, sink_count = sink_columns(layer, self._table.blocks.begins)
        if layer.tail is not None and launch.before:
            tail = torch.cat(layer.built.of(layer.tail[:, : launch.before]), -1)
        if layer.sinks is not None:
            sinks = torch.cat(self._codec.exact(layer.sinks.rows), -1)
        start(
            attend_exact,
            (launch.batch * launch.groups, launch.row_programs),
            self._device,
            *launch.heads,
            *launch.exact_rows(tail, sinks, columns),
            *launch.mask_arguments(self._nothing),
            sums,
            maxima,
            launch.limit,
            launch.past,
            launch.before,
            sink_count,
            launch.shape,
            launch.scaling,
            launch.softcap,
            D=launch.size,
            DP=power(launch.size),
            ROWS=launch.program_rows,
            **launch.constants,
        )

    def _source(self) -> Any:
        """What else keys and values come from: sums over layers ``[B, T, C]``, where it is these."""
        recalled = recalled_rows(self._layer)
        if recalled is None:
            return Rows(self._nothing, *row_strides(self._nothing))
        rows = self._codec.sources(recalled)[0]
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return Rows(rows, *row_strides(rows))

    def _score(self, launch: Launch, source: Any, scores: Tensor) -> None:
        """Write the scores of all blocks, ``[B, G, rows, columns * n]``."""
        of_keys = self._matrix, self._bias, self._gain, self._epsilon
        channels = self._codec.key_weight.shape[1]
        self._launch_scores(
            rebuild, launch, scores, (self._table.segment(0), source, *of_keys), channels
        )

    def _launch_scores(
        self, kernel: Any, launch: Launch, scores: Tensor, of_keys: tuple[Any, ...], channels: int
    ) -> None:
        """Run a kernel that rebuilds keys of ``channels`` channels; ``of_keys``: its own arguments, from the
        blocks to what keys are made with."""
        table = self._table
        columns, sink_count = sink_columns(self._layer, table.blocks.begins)
        start(
            kernel,
            (table.columns, launch.groups // self._program_heads, launch.batch),
            self._device,
            Heads.of(launch.query),
            columns,
            *launch.mask_arguments(self._nothing),
            scores,
            *of_keys,
            launch.rope,
            table.columns,
            launch.limit,
            sink_count,
            channels,
            launch.shape,
            launch.scaling,
            launch.softcap,
            ROWS=launch.padded_rows,
            SINKS=sink_count and power(sink_count),
            **launch.constants,
            **self._key_constants,
        )

    def _sum(
        self, launch: Launch, source: Any, scores: Tensor, per_split: int, out: list[Tensor]
    ) -> None:
        """Write the splits of the sums of what values come from, and their maxima."""
        grid = -(-self._table.columns // per_split), *self._sum_grid(launch)
        given = self._sum_arguments(launch, source, per_split)
        start(sum_states, grid, self._device, scores, *out, *given, **self._sum_constants)

    def _blocks_per_split(self, launch: Launch, source: Any) -> int:
        """How many blocks a program sums."""
        given = self._sum_arguments(launch, source, 1)
        slots = self._slots.of(*[self._nothing] * 3, *given, **self._sum_constants)
        return blocks_per_split(self._table.columns, prod(self._sum_grid(launch)), slots)

    def _sum_grid(self, launch: Launch) -> tuple[int, int]:
        """Runs of channels, and sequences times runs of rows."""
        runs = -(-self._codec.value_weight.shape[1] // self._sum_constants["D"])
        return runs, launch.batch * -(-launch.groups * launch.rows // SUM_ROWS)

    def _sum_arguments(self, launch: Launch, source: Any, per_split: int) -> tuple[Any, ...]:
        """Of `sum_states`, behind its workspace."""
        return (
            self._table.segment(len(self._layer.codec.segments) - 1),
            source,
            self._table.columns,
            per_split,
            launch.groups * launch.rows,
            self._codec.value_weight.shape[1],
            launch.batch,
        )

    def _project(
        self, launch: Launch, coded: list[Tensor], splits: int, maxima_out: Tensor
    ) -> Tensor:
        """Values ``[B, G, rows, D]`` of all blocks, from the splits of their sums."""
        weight, bias = self._codec.value_weight, self._codec.value_bias
        channels, rows = weight.shape[1], launch.groups * launch.rows
        combined = torch.empty(
            launch.batch,
            launch.groups,
            launch.rows,
            channels,
            dtype=weight.dtype,
            device=self._device,
        )
        start(
            combine,
            (rows, launch.batch, -(-channels // COMBINED)),
            self._device,
            *coded,
            Heads(combined, rows * channels, channels, 0),
            maxima_out,
            None,
            splits,
            None,
            None,
            Shape(1, rows, 1),
            D=channels,
            DP=min(COMBINED, power(channels)),
            N=None,
            PARTIAL=True,
        )
        values = combined @ weight.unflatten(0, (launch.groups, -1)).mT
        return values if bias is None else values + bias.view(launch.groups, 1, -1)

"""Attention over keys that are rebuilt from packed rows, by Triton: jit/rebuild.py and jit/sum_states.py.

Keys are rebuilt and scored block by block. Values: see `rebuilding`. It equals attention over
`CompressedLayer.read`.
"""

from math import gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...quant.operand import Operand
from ..backend import Shared
from ..packed_call import GpuAttention, PackedCall
from ..rebuilding import recalled_rows
from ..splits import blocks_per_split
from .arguments import Heads, KeyWeights, Matrix, Rows, Shape
from .attention import combine_splits
from .device import Slots, start
from .jit.attend_exact import attend_exact
from .jit.combine import combine
from .jit.rebuild import rebuild
from .jit.sum_states import CHANNEL_LANES, PLAIN, TOKEN_LANES, sum_states
from .launch import Launch, Past
from .matrices import CHUNK, PackedStates, by_chunk
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer

MOST_SUMMED = 128
"""Channels that a program sums."""
MOST_PAIRED = 128
"""Channels of a head up to which a program rebuilds two heads."""
SUM_ROWS = 32
"""Rows of a program that sums: query heads times queries."""
COMBINED = 256
"""Channels that a program combines."""


class TritonRebuilding(GpuAttention):
    """Attends over one layer."""

    def __init__(self, layer: "CompressedLayer", shared: Shared) -> None:
        codec, block = layer.codec.rematerialized, layer.stream.block
        assert codec is not None
        view = codec.view
        operands = [KernelOperand.of(s, block, s.channels, view.device) for s in codec.segments]
        super().__init__(layer, shared, [operand.offline for operand in operands])
        self._codec, self._device = codec, view.device
        self._nothing = torch.zeros(1, device=view.device, dtype=torch.float32)
        # Of the type of rows that are there: for others a kernel would be another.
        self._no_rows = torch.zeros(1, 0, 2 * view.kv_width, dtype=view.dtype, device=view.device)
        self._no_columns = torch.zeros(1, 0, dtype=torch.int32, device=view.device)
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
        self._accumulated = codec.sums_deltas
        states = None
        if not self._accumulated:
            states = PackedStates.of(codec.segments[0], block, view.device)
        if "triton keys" not in codec.prepared:
            codec.prepared["triton keys"] = list(by_chunk(codec.key_weight, states))
        matrix, bias = Matrix(*codec.prepared["triton keys"]), codec.key_bias
        norm = None if view.key_norm is None else view.key_gain()
        own = self._nothing if bias is None else bias.float().contiguous()
        self._weights = KeyWeights(matrix, own, *(norm or (self._nothing, 0.0)))
        plain = {"TILE": None, "LAYOUT": None, "CHUNK": CHUNK}
        packed = plain if states is None else states.constants()
        chunk = CHUNK if states is None else states.chunk
        self._key_constants |= {
            "CHUNKS": matrix.data.shape[1] // chunk,
            "PACKED": states is not None,
            "BIAS": bias is not None,
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

    def _answer(self, packed: PackedCall, out: Tensor) -> None:
        launch, columns = Launch.of(packed, out), self._table.columns
        past = Past.of_cache(packed, self._table, *self._exact(packed.before))
        rows, size = launch.heads * launch.rows, launch.size
        channels = self._codec.value_weight.shape[1]
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
        start(
            attend_exact,
            (launch.heads, launch.row_programs),
            self._device,
            launch.call,
            *launch.mask_strides,
            past.memory,
            past.limit,
            past.tail,
            past.sinks,
            sums,
            maxima,
            D=size,
            DP=power(size),
            ROWS=launch.program_rows,
            **launch.constants,
        )
        if columns:
            self._score(launch, past, source, scores)
            self._sum(launch, source, scores, per_split, coded)
            values = self._project(launch, coded, splits, maxima[2 * rows :])
            sums[rows * size : 2 * rows * size].view_as(values).copy_(values)
        combine_splits(sums, maxima, 1 + (columns > 0), launch)
        if self._layer.below is not None:
            self._layer.below.release()

    def _exact(self, before: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Keys beside values of the ``before`` tokens of the tail, and of sinks with their columns, which are
        projected as the model does."""
        layer, tail, sinks = self._layer, self._no_rows, (self._no_rows, self._no_columns)
        if layer.tail is not None and before:
            tail = torch.cat(layer.built.of(layer.tail[:, :before]), -1)
        if layer.sinks is not None:
            sinks = torch.cat(self._codec.exact(layer.sinks.rows), -1), layer.sinks.columns
        return tail, sinks

    def _source(self) -> Rows | None:
        """What else keys and values come from: sums over layers ``[B, T, C]``, where it is these."""
        recalled = recalled_rows(self._layer)
        if recalled is None:
            return None
        rows = self._codec.sources(recalled)[0]
        return Rows.of(rows if rows.stride(-1) == 1 else rows.contiguous())

    def _score(self, launch: Launch, past: Past, source: Rows | None, scores: Tensor) -> None:
        """Write the scores of all blocks, ``[B, G, rows, columns * n]``."""
        blocks = self._table.segment(0)
        start(
            rebuild,
            (past.columns, launch.call.shape.kv_heads // self._program_heads, launch.batch),
            self._device,
            launch.call,
            *launch.mask_strides,
            past.memory._replace(blocks=blocks),
            past.columns,
            past.limit,
            past.sinks,
            source,
            self._weights,
            self._codec.key_weight.shape[1],
            scores,
            ROWS=launch.padded_rows,
            SINKS=past.sinks and power(past.sinks),
            **launch.constants,
            **self._key_constants,
        )

    def _sum(
        self,
        launch: Launch,
        source: Rows | None,
        scores: Tensor,
        per_split: int,
        out: list[Tensor],
    ) -> None:
        """Write the splits of the sums of what values come from, and their maxima."""
        grid = -(-self._table.columns // per_split), *self._sum_grid(launch)
        given = self._sum_arguments(launch, source, per_split)
        start(sum_states, grid, self._device, scores, *out, *given, **self._sum_constants)

    def _blocks_per_split(self, launch: Launch, source: Rows | None) -> int:
        """How many blocks a program sums."""
        given = self._sum_arguments(launch, source, 1)
        slots = self._slots.of(*[self._nothing] * 3, *given, **self._sum_constants)
        return blocks_per_split(self._table.columns, prod(self._sum_grid(launch)), slots)

    def _sum_grid(self, launch: Launch) -> tuple[int, int]:
        """Runs of channels, and sequences times runs of rows."""
        runs = -(-self._codec.value_weight.shape[1] // self._sum_constants["D"])
        rows = launch.call.shape.kv_heads * launch.rows
        return runs, launch.batch * -(-rows // SUM_ROWS)

    def _sum_arguments(self, launch: Launch, source: Rows | None, per_split: int) -> tuple[Any, ...]:
        """Of `sum_states`, behind its workspace."""
        return (
            self._table.segment(len(self._layer.codec.segments) - 1),
            source,
            self._table.columns,
            per_split,
            launch.call.shape.kv_heads * launch.rows,
            self._codec.value_weight.shape[1],
            launch.batch,
        )

    def _project(self, launch: Launch, coded: list[Tensor], splits: int, maxima_out: Tensor) -> Tensor:
        """Values ``[B, G, rows, D]`` of all blocks, from the splits of their sums."""
        weight, bias = self._codec.value_weight, self._codec.value_bias
        groups, channels = launch.call.shape.kv_heads, weight.shape[1]
        rows = groups * launch.rows
        shape = launch.batch, groups, launch.rows, channels
        combined = torch.empty(shape, dtype=weight.dtype, device=self._device)
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
            Shape(1, rows, 1),
            D=channels,
            DP=min(COMBINED, power(channels)),
            N=None,
            PARTIAL=True,
        )
        values = combined @ weight.unflatten(0, (groups, -1)).mT
        return values if bias is None else values + bias.view(groups, 1, -1)

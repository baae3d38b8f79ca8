"""Attention by Triton over keys and values that are rebuilt: one layer's side of the kernels.

Only keys are rebuilt. What values come from is summed by the weights, and the sums are multiplied by the
value projection once all blocks are joined (arXiv 2508.10395 rebuilds both).
"""

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...quant.operand import Operand
from ..backend import LayerAttention
from ..call import AttentionCall
from ..rebuilding import recalled_rows
from ..rope import RopeTable
from ..workspace import Workspace
from .attention import combine_splits, steps
from .block_table import BlockTable
from .jit.attend_exact import exact
from .jit.combine import combine
from .jit.rebuild import rebuild
from .jit.sum_states import sum_states
from .launch import Launch, blocks_per_split, launch_of
from .matrices import CHUNK, Coded, by_chunk
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

MOST_SUMMED = 128
"""Channels that a program sums."""
MOST_PAIRED = 128
"""Channels of a head up to which a program rebuilds two heads."""
SUM_ROWS = 32
"""Query heads times queries of a program that sums."""
JOINED = 256
"""Channels that a program joins."""


class TritonRebuilding(LayerAttention):
    """Attends over one layer."""

    def __init__(self, layer: "CompressedLayer", rope: RopeTable, workspace: Workspace) -> None:
        self._layer, self._rope, self._workspace = layer, rope, workspace
        codec, block = layer.codec.rematerialized, layer.stream.block
        assert codec is not None
        view = codec.view
        self._codec, self._device = codec, view.device
        self._nothing = torch.zeros(1, device=view.device)
        operands = [KernelOperand.of(s, block, s.channels, view.device) for s in codec.segments]
        self._table = BlockTable(layer.stream, operands, view.device)
        self._accumulated = codec.reads_below or codec.feeds_above
        coded = None if self._accumulated else Coded.of(codec.segments[0], block, view.device)
        if "triton keys" not in codec.prepared:
            codec.prepared["triton keys"] = list(by_chunk(codec.key_weight, coded))
        self._weights, self._units = codec.prepared["triton keys"]
        bias = view.key_bias
        self._bias = self._nothing if bias is None else bias.float().contiguous()
        found = None if view.key_norm is None else view.key_gain()
        self._gain, self._epsilon = found or (self._nothing, 0.0)
        whole = {"N": block, "NP": power(block)}
        none = {"TILE": CHUNK, "BITS": 4, "PER_TOKEN": True, "SPAN": 0, "GROUP": 1, "CHUNK": CHUNK}
        constants = none if coded is None else coded.constants()
        pairs = view.kv_heads % 2 == 0 and power(view.head_size) <= MOST_PAIRED
        self._together = 2 if pairs else 1
        self._keys: dict[str, Any] = {
            "D": view.head_size,
            "DP": power(view.head_size),
            "HEADS": self._together,
            "CHUNKS": self._weights.shape[1] // constants["CHUNK"],
            "CODED": coded is not None,
            "BIAS": bias is not None,
            "NORM": found is not None,
            "num_warps": 8,
            **constants,
            **whole,
        }
        self._values = {**self._summed(), **whole, "num_warps": 8}

    def _summed(self) -> dict[str, Any]:
        """What sums of values are compiled for."""
        codec, segment = self._codec, self._codec.segments[-1]
        if self._accumulated:
            size = min(MOST_SUMMED, power(codec.value_weight.shape[1]))
            return {"SOURCE": 0, "D": size, "DP": size, "BITS": 4, "SPAN": 0, "GROUP": 1}
        operand = segment.operand(self._layer.stream.block)
        assert isinstance(operand, Operand) and operand.tile is not None
        by_token = operand.tile.lanes == "tokens"
        size = operand.tile.head if by_token else gcd(operand.group, MOST_SUMMED)
        one = KernelOperand.of(segment, self._layer.stream.block, size, self._device)
        return {
            "SOURCE": 2 if by_token else 1,
            "D": size,
            "DP": power(size),
            "BITS": operand.bits,
            "SPAN": one.span,
            "GROUP": operand.group,
        }

    def attend(self, call: AttentionCall) -> Tensor | None:
        """See `LayerAttention.attend`. Asks the device for nothing while no block is sealed."""
        found = launch_of(self._layer, call, self._rope)
        if found is None:
            return None
        self._table.refresh()
        heads, size = found.batch * found.groups * found.rows, found.size
        channels, columns = self._codec.value_weight.shape[1], self._table.columns
        sequences = found.batch * -(-found.groups * found.rows // SUM_ROWS)
        share = blocks_per_split(
            columns, -(-channels // self._values["D"]) * sequences, self._device
        )
        parts = -(-columns // share)
        # The exact tokens are one part of what is joined at last, all blocks are the other.
        sums, peaks, scores, *coded = self._workspace.take(
            self._device,
            2 * heads * size,
            2 * heads * 2,
            heads * columns * self._layer.stream.block,
            parts * heads * channels,
            parts * heads * 2,
        )
        self._exact(found, sums, peaks)
        if columns:
            rows_in = self._rows_in()
            self._score(found, rows_in, scores)
            self._sum(found, rows_in, scores, share, coded)
            part = self._project(found, coded, parts, peaks[2 * heads :])
            sums[heads * size : 2 * heads * size].view_as(part).copy_(part)
        out = found.new_out()
        combine_splits(sums, peaks, 1 + (columns > 0), found, out)
        if self._layer.below is not None:
            self._layer.below.release()
        return out

    def _exact(self, found: Launch, sums: Tensor, peaks: Tensor) -> None:
        """What is kept exactly: keys and values of its rows are projected as the model does."""
        layer, nothing = self._layer, self._nothing
        tail, sinks, sink_at, sink_count = nothing, nothing, self._table.begins, 0
        kept = [] if layer.tail is None else [layer.tail[:, : found.before]]
        if layer.sinks is not None:
            kept.insert(0, layer.sinks.rows)
            sink_at, sink_count = layer.sinks.columns, layer.sinks.rows.shape[1]
        if found.before + sink_count:
            rows = torch.cat(kept, 1) if len(kept) > 1 else kept[0]
            states = torch.cat(self._codec.exact(rows), -1)
            sinks, tail = states[:, :sink_count], states[:, sink_count:]
        exact[(found.batch * found.groups, found.runs)](
            found.query,
            found.key,
            found.value,
            tail,
            sinks,
            sink_at,
            nothing if found.mask is None else found.mask,
            sums,
            peaks,
            *found.tail,
            *found.sinks,
            found.limit,
            found.past,
            found.before,
            sink_count,
            found.queries,
            found.group_heads,
            found.groups,
            *found.query.stride()[:3],
            *found.key.stride()[:3],
            *found.value.stride()[:3],
            *steps(tail),
            *steps(sinks),
            *found.mask_steps,
            found.scaling,
            found.softcap,
            D=found.size,
            DP=power(found.size),
            ROWS=found.each,
            **found.constants,
        )

    def _rows_in(self) -> Tensor:
        """Sums over layers ``[B, T, C]``, where keys and values come from them."""
        recalled = recalled_rows(self._layer)
        if recalled is None:
            return self._nothing
        rows = self._codec.sources(recalled)[0]
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def _score(self, found: Launch, rows_in: Tensor, scores: Tensor) -> None:
        layer, table = self._layer, self._table
        sink_at, sink_count = table.begins, 0
        if layer.sinks is not None:
            sink_at = layer.sinks.columns
            sink_count = sink_at.shape[1]
        rebuild[(table.columns, found.groups // self._together, found.batch)](
            found.query,
            sink_at,
            self._nothing if found.mask is None else found.mask,
            scores,
            table.of(0),
            rows_in,
            table.begins,
            table.lengths,
            self._weights,
            self._units,
            self._bias,
            self._gain,
            *found.start,
            *found.within,
            table.columns,
            found.limit,
            sink_count,
            found.queries,
            found.group_heads,
            found.groups,
            self._codec.key_weight.shape[1],
            *found.query.stride()[:3],
            *steps(rows_in),
            *found.mask_steps,
            found.scaling,
            found.softcap,
            self._epsilon,
            ROWS=found.padded_rows,
            SINKS=sink_count and power(sink_count),
            **found.constants,
            **self._keys,
        )

    def _sum(
        self, found: Launch, rows_in: Tensor, scores: Tensor, share: int, out: list[Tensor]
    ) -> None:
        table, channels = self._table, self._codec.value_weight.shape[1]
        rows = found.groups * found.rows
        parts, runs = -(-table.columns // share), -(-channels // self._values["D"])
        sum_states[(parts, runs, found.batch * -(-rows // SUM_ROWS))](
            scores,
            *out,
            table.of(len(self._layer.codec.segments) - 1),
            rows_in,
            table.begins,
            table.lengths,
            table.columns,
            share,
            rows,
            channels,
            *steps(rows_in),
            found.batch,
            ROWS=SUM_ROWS,
            **self._values,
        )

    def _project(self, found: Launch, coded: list[Tensor], parts: int, peaks_out: Tensor) -> Tensor:
        """Values ``[B, G, rows, D]`` of all blocks, from the parts of their sums."""
        weight, bias = self._codec.value_weight, self._codec.value_bias
        channels, rows = weight.shape[1], found.groups * found.rows
        joined = torch.empty(
            found.batch, found.groups, found.rows, channels, dtype=weight.dtype, device=self._device
        )
        combine[(rows, found.batch, -(-channels // JOINED))](
            *coded,
            joined,
            parts,
            1,
            rows,
            1,
            rows * channels,
            0,
            channels,
            peaks_out,
            D=channels,
            DP=min(JOINED, power(channels)),
            OPEN=True,
        )
        values = joined @ weight.unflatten(0, (found.groups, -1)).mT
        return values if bias is None else values + bias.view(found.groups, 1, -1)

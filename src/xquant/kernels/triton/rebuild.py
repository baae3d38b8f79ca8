"""Attention by Triton over keys and values that are rebuilt: one layer's side of the kernels.

Only keys are rebuilt. What values come from is summed by the weights, and the sums are multiplied by the
value projection once all blocks are joined (arXiv 2508.10395 rebuilds both).
"""

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...methods.xquant import Rematerialized
from ...quant import Affine
from ..call import Newest
from .angles import TurnBook
from .attention import join_parts, steps
from .describe import side
from .jit.combine import join
from .jit.exact import exact
from .jit.rebuild import rebuild
from .jit.sum_states import sum_states
from .launch import Asked, asked, share_of
from .matrices import CHUNK, Coded, arranged
from .support import power
from .table import BlockTable

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


class TritonRebuilt:
    """Attends over one layer. Holds addresses, so it is never copied with the cache."""

    def __init__(self, layer: "CompressedLayer", book: TurnBook) -> None:
        self._layer, self._book = layer, book
        codec, block = layer.codec, layer.stream.block
        assert isinstance(codec, Rematerialized)
        view = codec.view
        self._codec, self._device = codec, view.device
        self._nothing = torch.zeros(1, device=view.device)
        sides = [side(s, block, s.channels, view.device) for s in layer.codec.segments]
        self._table = BlockTable(layer.stream, sides, view.device)
        self._carried = codec.reads_below or codec.feeds_above
        coded = None if self._carried else Coded.of(codec.segments[0], block, view.device)
        if "triton keys" not in codec.prepared:
            codec.prepared["triton keys"] = list(arranged(codec.key_weight, coded))
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
        if self._carried:
            size = min(MOST_SUMMED, power(codec.value_weight.shape[1]))
            return {"SOURCE": 0, "D": size, "DP": size, "BITS": 4, "SPAN": 0, "GROUP": 1}
        quantizer = segment.quantizer
        assert isinstance(quantizer, Affine) and quantizer.tile is not None
        by_token = quantizer.tile.lanes == "tokens"
        group = quantizer.range_size(segment.channels)
        size = quantizer.tile.head if by_token else gcd(group, MOST_SUMMED)
        one = side(segment, self._layer.stream.block, size, self._device)
        return {
            "SOURCE": 2 if by_token else 1,
            "D": size,
            "DP": power(size),
            "BITS": one.bits,
            "SPAN": one.span,
            "GROUP": one.group,
        }

    def attend(self, newest: Newest) -> Tensor | None:
        """As `PackedAttention.attend`. Asks the device for nothing while no block is sealed."""
        found = asked(self._layer, newest, self._book)
        if found is None:
            return None
        self._table.refresh()
        heads, size = found.batch * found.groups * found.rows, found.size
        channels, columns = self._codec.value_weight.shape[1], self._table.columns
        sequences = found.batch * -(-found.groups * found.rows // SUM_ROWS)
        share = share_of(columns, -(-channels // self._values["D"]) * sequences, self._device)
        parts = -(-columns // share)
        # The exact tokens are one part of what is joined at last, all blocks are the other.
        sums, peaks, scores, *coded = self._book.room(
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
        join_parts(sums, peaks, 1 + (columns > 0), found, out)
        if self._layer.below is not None:
            self._layer.below.release()
        return out

    def _exact(self, found: Asked, sums: Tensor, peaks: Tensor) -> None:
        """What is kept exactly: keys and values of its rows are projected as the model does."""
        layer, nothing = self._layer, self._nothing
        tail, sinks, sink_at, sink_count = nothing, nothing, self._table.begins, 0
        kept = [] if layer.tail is None else [layer.tail[:, : found.before]]
        if layer.sinks is not None and layer.sink_at is not None:
            kept.insert(0, layer.sinks)
            sink_at, sink_count = layer.sink_at, layer.sinks.shape[1]
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
        if not self._carried:
            return self._nothing
        layer = self._layer
        recalled = layer.recalled if layer.recalled is not None else layer.recall()
        assert recalled is not None
        rows = self._codec.sources(recalled)[0]
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def _score(self, found: Asked, rows_in: Tensor, scores: Tensor) -> None:
        layer, table = self._layer, self._table
        sink_at = table.begins if layer.sink_at is None else layer.sink_at
        sink_count = 0 if layer.sink_at is None else layer.sink_at.shape[1]
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
            *found.turn,
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
        self, found: Asked, rows_in: Tensor, scores: Tensor, share: int, out: list[Tensor]
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

    def _project(self, found: Asked, coded: list[Tensor], parts: int, peaks_out: Tensor) -> Tensor:
        """Values ``[B, G, rows, D]`` of all blocks, from the parts of their sums."""
        weight, bias = self._codec.value_weight, self._codec.value_bias
        channels, rows = weight.shape[1], found.groups * found.rows
        joined = torch.empty(
            found.batch, found.groups, found.rows, channels, dtype=weight.dtype, device=self._device
        )
        join[(rows, found.batch, -(-channels // JOINED))](
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

"""Sums over layers by Triton: what each layer adds goes into the sum of the layers below, in its memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .block_table import BlockTable
from .jit.accumulate import accumulate
from .matrices import Coded, by_chunk
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

MOST_OUT = 128
"""Channels of the sum that a program adds to."""


class TritonAccumulator:
    """One layer's side of it. Holds addresses, so it is never copied with the cache."""

    def __init__(self, layer: "CompressedLayer") -> None:
        codec, segment, block = layer.codec, layer.codec.segments[0], layer.stream.block
        assert codec.sums_deltas
        self._layer, self._codec = layer, codec
        device = codec.view.device
        coded = Coded.of(segment, block, device)
        own = KernelOperand.of(segment, block, coded.tile, device)
        self._table = BlockTable(layer.stream, [own], device)
        self._nothing = torch.zeros(1, device=device)
        self._weights = self._units = self._nothing
        if codec.synthesis is not None:
            if "triton sums" not in codec.prepared:
                codec.prepared["triton sums"] = list(by_chunk(codec.synthesis, coded))
            self._weights, self._units = codec.prepared["triton sums"]
        chunks = segment.channels // coded.tile * -(-coded.tile // coded.chunk)
        out = min(MOST_OUT, power(codec.width))
        self._runs = chunks if codec.synthesis is None else -(-codec.width // out)
        self._constants: dict[str, Any] = {
            "N": block,
            "NP": power(block),
            "OUT": out,
            "CHUNKS": chunks,
            "WEIGHTED": codec.synthesis is not None,
            "num_warps": 8,
            **coded.constants(),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """The cache that a layer is copied with gives it one of its own."""

    def accumulate(self, below: Tensor | None) -> Tensor:
        """The sum of this layer's sealed tokens ``[B, T, W]``, with sinks as they are; ``below``, that of the
        layer below, is written over."""
        layer, table = self._layer, self._table
        table.refresh()
        assert layer.stream.table is not None
        out = below
        if out is None:
            shape = len(layer.stream.table), layer.stream.tokens, self._codec.width
            out = torch.empty(shape, dtype=self._codec.view.dtype, device=self._codec.view.device)
        sinks, sink_at, sink_count = self._nothing, table.begins, 0
        if layer.sinks is not None:
            sinks, sink_at = layer.sinks.rows, layer.sinks.columns
            sink_count = sinks.shape[1]
        accumulate[(table.columns, self._runs, len(out))](
            out,
            table.addresses,
            table.begins,
            table.lengths,
            self._weights,
            self._units,
            sinks,
            sink_at,
            table.columns,
            sink_count,
            layer.codec.segments[0].channels,
            self._codec.width,
            *out.stride()[:2],
            BELOW=below is not None,
            **self._constants,
        )
        return out

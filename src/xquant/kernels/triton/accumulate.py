"""Sums over layers by Triton: jit/accumulate.py.

A layer of `xquant-cl` stores a delta to what the layers below accumulate. The kernel adds it in the memory of
their sum, block by block.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..addresses import BlockTable
from .arguments import Matrix, Rows
from .device import start
from .jit.accumulate import accumulate
from .matrices import PackedStates, by_chunk
from .operand import KernelOperand
from .support import power

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer

MOST_OUT = 128
"""Channels of the sum that a program adds to."""


class TritonAccumulator:
    """Accumulates one layer. Holds addresses, so it is never copied with the cache."""

    def __init__(self, layer: "CompressedLayer") -> None:
        codec, segment, block = layer.codec, layer.codec.segments[0], layer.stream.block
        assert codec.sums_deltas
        self._layer, self._codec = layer, codec
        device = codec.view.device
        states = PackedStates.of(segment, block, device)
        operand = KernelOperand.of(segment, block, states.tile, device)
        self._table = BlockTable(layer.stream, [operand.offline], device)
        self._nothing = torch.zeros(1, device=device, dtype=torch.float32)
        self._matrix = Matrix(self._nothing, self._nothing)
        if codec.synthesis is not None:
            if "triton sums" not in codec.prepared:
                codec.prepared["triton sums"] = list(by_chunk(codec.synthesis, states))
            self._matrix = Matrix(*codec.prepared["triton sums"])
        chunks = segment.channels // states.tile * -(-states.tile // states.chunk)
        out = min(MOST_OUT, power(codec.width))
        self._programs = chunks if codec.synthesis is None else -(-codec.width // out)
        self._constants: dict[str, Any] = {
            "N": block,
            "NP": power(block),
            "OUT": out,
            "CHUNKS": chunks,
            "WEIGHTED": codec.synthesis is not None,
            "num_warps": 8,
            **states.constants(),
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
        sinks, columns, sink_count = self._nothing, table.blocks.begins, 0
        if layer.sinks is not None:
            sinks, columns = layer.sinks.rows, layer.sinks.columns
            sink_count = columns.shape[1]
        start(
            accumulate,
            (table.columns, self._programs, len(out)),
            out.device,
            Rows.of(out),
            table.blocks,
            self._matrix,
            sinks,
            columns,
            table.columns,
            sink_count,
            layer.codec.segments[0].channels,
            self._codec.width,
            BELOW=below is not None,
            **self._constants,
        )
        return out

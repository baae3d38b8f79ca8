"""Attention over keys that are rebuilt from ranked codes, by Triton: jit/ranked.py.

As `rebuild`, with another kernel for scores and another for sums. Before them a third finds the order of the
channels of every block, which is forgotten after the step.
"""

from typing import Any

import torch
from torch import Tensor

from ...quant.operand import RankedOperand
from ...quant.ranked import level_table, size_table
from ...quant.trellis import WIDTHS
from .arguments import Matrix
from .block_table import BlockTable
from .jit.ranked import rank, ranked_scores, ranked_sums
from .launch import Launch
from .matrices import by_chunk
from .rebuild import SUM_ROWS, TritonRebuilding

RANKED = 64
"""Channels whose ranks a program finds."""


class TritonRanked(TritonRebuilding):
    """Attends over one layer."""

    def _prepare(self) -> None:
        codec, block = self._codec, self._layer.stream.block
        (segment,) = codec.segments
        operand = segment.operand(block)
        assert isinstance(operand, RankedOperand)
        self._channels = self._program_channels = segment.channels
        self._table = BlockTable(self._layer.stream, [None], self._device)
        if "triton keys" not in codec.prepared:
            codec.prepared["triton keys"] = by_channel(codec.key_weight)
        self._matrix = Matrix(*codec.prepared["triton keys"])
        self._usual = operand.usual.to(self._device, torch.int32)
        sizes, zero = size_table()
        self._sizes = sizes.to(self._device)[zero:]
        self._levels = level_table().to(self._device)
        self._runs = run_table(operand, block).to(self._device)

    def _scratch(self, launch: Launch) -> list[int]:
        return 2 * [launch.batch * self._table.columns * self._channels]

    def _source(self, launch: Launch, scratch: list[Tensor]) -> Any:
        """The channels of every block in the order of their scales, and these: two ``[B, columns, C]``."""
        order, size = scratch[0].view(torch.int32), scratch[1]
        table = self._table
        rank[(table.columns, -(-self._channels // RANKED), launch.batch)](
            order,
            size,
            table.blocks,
            self._usual,
            self._sizes,
            table.columns,
            self._channels,
            RANKED=RANKED,
        )
        return order, size

    def _score(self, launch: Launch, source: Any, scores: Tensor) -> None:
        tables = self._runs, self._levels, self._sizes
        of_keys = self._table.blocks, *source, *tables, self._matrix, self._bias
        self._launch_scores(ranked_scores, launch, scores, of_keys, self._channels)

    def _sum(
        self, launch: Launch, source: Any, scores: Tensor, per_split: int, out: list[Tensor]
    ) -> None:
        table, rows = self._table, launch.groups * launch.rows
        ranked_sums[(-(-table.columns // per_split), launch.batch * -(-rows // SUM_ROWS))](
            scores,
            *out,
            table.blocks,
            *source,
            self._runs,
            self._levels,
            self._sizes,
            table.columns,
            per_split,
            rows,
            self._channels,
            launch.batch,
            ROWS=SUM_ROWS,
            num_stages=1,  # what is added to is read and written in the loop
            **self._block_constants,
        )


def by_channel(weight: Tensor) -> list[Tensor]:
    """A matrix ``[M, C]`` as fp16 ``[C, M]``, each of the ``M`` divided by its unit, and the units."""
    matrix = by_chunk(weight.float(), None)
    return [matrix.data[:, : weight.shape[1]].T.contiguous(), matrix.units]


def run_table(operand: RankedOperand, block: int) -> Tensor:
    """What `jit.ranked` calls ``runs``, int32 ``[widths, 3]``."""
    rows, first, start = [], 0, 0
    for width, count in zip(WIDTHS[::-1], operand.counts[::-1], strict=True):
        rows.append((first, count, start))
        first, start = first + count, start + count * width.nbytes(block)
    return torch.tensor(rows, dtype=torch.int32)

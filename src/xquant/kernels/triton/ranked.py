"""Attention over keys that are rebuilt from ranked codes, by Triton: jit/ranked.py.

As `rebuild`, with another kernel for scores and another for sums. Before them a third finds the order of the
channels of every block, which is forgotten after the step. A second segment, of states that only values come
from, is summed alone.
"""

from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True)
class States:
    """How the states of one segment are packed."""

    usual: Tensor  # int32 [C]
    runs: Tensor  # see `run_table`
    first: int  # the place of its channels among those of all segments

    @property
    def channels(self) -> int:
        return len(self.usual)


class TritonRanked(TritonRebuilding):
    """Attends over one layer."""

    def _prepare(self) -> None:
        codec, block = self._codec, self._layer.stream.block
        self._states: list[States] = []
        self._program_channels = 0
        for segment in codec.segments:
            operand = segment.operand(block)
            assert isinstance(operand, RankedOperand)
            usual = operand.usual.to(self._device, torch.int32)
            runs = run_table(operand, block).to(self._device)
            self._states.append(States(usual, runs, self._program_channels))
            self._program_channels += segment.channels
        nothing = [None for _ in codec.segments]
        self._table = BlockTable(self._layer.stream, nothing, self._device)
        if "triton keys" not in codec.prepared:
            codec.prepared["triton keys"] = by_channel(codec.key_weight)
        self._matrix = Matrix(*codec.prepared["triton keys"])
        self._levels, self._sizes = tables(self._device)

    def _scratch(self, launch: Launch) -> list[int]:
        blocks = launch.batch * self._table.columns
        return [blocks * states.channels for states in self._states for _ in ("order", "size")]

    def _source(self, launch: Launch, scratch: list[Tensor]) -> Any:
        """Of each segment, the channels of every block in the order of their scales, and these: two ``[B,
        columns, C]``."""
        table, found = self._table, []
        for number, states in enumerate(self._states):
            order, size = scratch[2 * number].view(torch.int32), scratch[2 * number + 1]
            rank[(table.columns, -(-states.channels // RANKED), launch.batch)](
                order,
                size,
                table.segment(number),
                states.usual,
                self._sizes,
                table.columns,
                states.channels,
                RANKED=RANKED,
            )
            found.append((order, size))
        return found

    def _score(self, launch: Launch, source: Any, scores: Tensor) -> None:
        states = self._states[0]
        tables = states.runs, self._levels, self._sizes
        of_keys = self._table.segment(0), *source[0], *tables, self._matrix, self._bias
        self._launch_scores(ranked_scores, launch, scores, of_keys, states.channels)

    def _sum(
        self, launch: Launch, source: Any, scores: Tensor, per_split: int, out: list[Tensor]
    ) -> None:
        table, rows = self._table, launch.groups * launch.rows
        for number, states in enumerate(self._states):
            ranked_sums[(-(-table.columns // per_split), launch.batch * -(-rows // SUM_ROWS))](
                scores,
                *out,
                table.segment(number),
                *source[number],
                states.runs,
                self._levels,
                self._sizes,
                table.columns,
                per_split,
                rows,
                states.channels,
                states.first,
                self._program_channels,
                launch.batch,
                ROWS=SUM_ROWS,
                num_stages=1,  # what is added to is read and written in the loop
                **self._block_constants,
            )


def by_channel(weight: Tensor) -> list[Tensor]:
    """A matrix ``[M, C]`` as fp16 ``[C, M]``, each of the ``M`` divided by its unit, and the units."""
    matrix = by_chunk(weight.float(), None)
    return [matrix.data[:, : weight.shape[1]].T.contiguous(), matrix.units]


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels of all widths, fp32 ``[widths, 2, 256]``, and sizes of whole steps, from that of 0 on."""
    sizes, zero = size_table()
    return level_table().to(device), sizes.to(device)[zero:]


def run_table(operand: RankedOperand, block: int) -> Tensor:
    """What `jit.ranked` calls ``runs``, int32 ``[widths, 3]``."""
    rows, first, start = [], 0, 0
    for width, count in zip(WIDTHS[::-1], operand.counts[::-1], strict=True):
        rows.append((first, count, start))
        first, start = first + count, start + count * width.nbytes(block)
    return torch.tensor(rows, dtype=torch.int32)

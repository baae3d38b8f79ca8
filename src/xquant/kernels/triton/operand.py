"""How the keys or the values of a layer are packed, as the kernels read them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Segment
from ...quant.operand import Operand
from .jit.unpack import CHANNEL, TILE, TOKEN


class Layout(NamedTuple):
    """How codes and ranges lie, which a kernel is compiled for. See `Operand`."""

    bits: int
    codebook: bool
    """Whether codes are numbers of levels in a table."""
    per_token: bool
    span: int
    """How far a range reaches within a head of a block. `jit.unpack.CHANNEL`: over all tokens of a channel;
    `TOKEN`: all channels of a token; `TILE`: less than either."""
    group: int
    count_bytes: int


@dataclass(frozen=True, eq=False)
class KernelOperand:
    """An `Operand` with its tables on the device."""

    layout: Layout
    levels: Tensor | None
    """fp16 ``[2**bits]``, of a codebook."""
    offline: tuple[Tensor, Tensor] | None
    """Scale and zero, fp16 ``[C]``, where all blocks share them."""

    @classmethod
    def of(cls, segment: Segment, block: int, head: int, device: torch.device) -> "KernelOperand":
        """For heads of ``head`` channels in blocks of ``block`` tokens."""
        operand = segment.operand(block)
        assert isinstance(operand, Operand)
        group, levels, offline = operand.group, operand.levels, operand.offline
        if offline is not None:
            span = CHANNEL
        elif operand.per_token:
            starts = range(0, segment.channels, head)
            whole = all(first // group == (first + head - 1) // group for first in starts)
            span = TOKEN if whole else TILE
        else:
            span = CHANNEL if group >= block else TILE
        if levels is not None:
            levels = levels.to(device).half().contiguous()
        if offline is not None:
            scale, zero = (t.to(device).contiguous() for t in offline)
            offline = scale, zero
        layout = Layout(
            operand.bits,
            levels is not None,
            operand.per_token,
            span.value,
            group,
            operand.count_bytes,
        )
        return cls(layout, levels, offline)

"""How the keys or the values of a layer are packed, as the kernels read them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...quant import Segment
from ...quant.operand import Operand
from .jit.unpack import CHANNEL, TILE, TOKEN


@dataclass(frozen=True, eq=False)
class KernelOperand:
    """An `Operand` with its tables on the device, and how far its ranges reach within a head of a block."""

    operand: Operand
    span: int
    """`jit.unpack.CHANNEL`: a range holds all tokens of a channel; `TOKEN`: all channels of a token;
    `TILE`: less than either."""
    levels: Tensor | None
    """fp16 ``[2**bits]``, of a codebook."""
    fixed: tuple[Tensor, Tensor] | None
    """Scale and zero, fp16 ``[C]``, where all blocks share them."""

    @classmethod
    def of(cls, segment: Segment, block: int, head: int, device: torch.device) -> "KernelOperand":
        """For heads of ``head`` channels in blocks of ``block`` tokens."""
        operand = segment.operand(block)
        assert isinstance(operand, Operand)
        group, levels, fixed = operand.group, operand.levels, operand.fixed
        if fixed is not None:
            span = CHANNEL
        elif operand.per_token:
            starts = range(0, segment.channels, head)
            whole = all(first // group == (first + head - 1) // group for first in starts)
            span = TOKEN if whole else TILE
        else:
            span = CHANNEL if group >= block else TILE
        if levels is not None:
            levels = levels.to(device).half().contiguous()
        if fixed is not None:
            scale, zero = (t.to(device).contiguous() for t in fixed)
            fixed = scale, zero
        return cls(operand, span.value, levels, fixed)

    def constants(self, name: str) -> dict[str, Any]:
        """The arguments of a kernel that it is compiled for."""
        return {
            f"{name}_BITS": self.operand.bits,
            f"{name}_TABLE": self.levels is not None,
            f"{name}_PER_TOKEN": self.operand.per_token,
            f"{name}_SPAN": self.span,
            f"{name}_GROUP": self.operand.group,
            f"{name}_SPARSE": self.operand.count_bytes,
        }

"""BlockTable: the addresses of a layer's packed blocks, on the device."""

import torch
from torch import Tensor

from ...store.stream import Stream
from ..addresses import BlockAddresses
from .operand import KernelOperand

FIELDS = ("codes", "scale", "zero", "outlier_count", "outlier_excess", "outlier_channel")
"""The packed fields of a segment, in the order in which a kernel finds their addresses."""


class BlockTable:
    """The addresses of a stream's blocks, by sequence and column of its table.

    ``addresses`` int64 ``[segments * FIELDS, B, columns]``: the addresses of one field lie together for the
    columns of a sequence; ``begins`` and ``lengths`` int32 ``[columns]``: first token and number of tokens.
    """

    def __init__(self, stream: Stream, operands: list[KernelOperand], device: torch.device) -> None:
        self._stream, self._operands, self._device = stream, operands, device
        self._blocks = BlockAddresses(stream)
        self.columns = 0
        self.addresses = torch.zeros(1, dtype=torch.int64, device=device)
        self.begins = self.lengths = torch.zeros(1, dtype=torch.int32, device=device)

    def refresh(self) -> None:
        """Point to the blocks as they are now."""
        blocks = self._blocks
        if not blocks.refresh():
            return
        self.columns = blocks.columns
        if blocks.table is None:
            return
        fields = [self._fields(number) for number in range(len(self._operands))]
        by_block = torch.stack([addresses for segment in fields for addresses in segment])
        self.addresses = by_block.to(self._device, non_blocking=True)[:, blocks.table]
        lengths = blocks.lengths
        spans = torch.stack([lengths.cumsum(0, dtype=torch.int32) - lengths, lengths])
        self.begins, self.lengths = spans.to(self._device, non_blocking=True)

    def of(self, number: int) -> Tensor:
        """The addresses of one segment."""
        return self.addresses[number * len(FIELDS) : (number + 1) * len(FIELDS)]

    def _fields(self, number: int) -> list[Tensor]:
        """The addresses of each field of every block, int64 ``[N]``; 0 where there is none."""
        count, fixed = self._stream.blocks, self._operands[number].fixed
        addresses = dict(self._blocks.fields[number])
        if fixed is not None:
            for name, shared in zip(("scale", "zero"), fixed, strict=True):
                addresses[name] = torch.full((count,), shared.data_ptr())
        nowhere = torch.zeros(count, dtype=torch.int64)
        return [addresses.get(name, nowhere) for name in FIELDS]

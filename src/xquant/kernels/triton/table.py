"""Where the packed blocks of a layer lie, as the kernels look them up."""

import torch
from torch import Tensor

from ...store.stream import Stream
from ..addresses import BlockAddresses
from .describe import Side

FIELDS = ("codes", "scale", "zero", "outlier_count", "outlier_excess", "outlier_channel")
"""In the order in which a kernel finds their addresses."""


class BlockTable:
    """The addresses of a stream's blocks on the device, by sequence and column of its table.

    ``addresses`` int64 ``[segments * FIELDS, B, columns]``: what a block is read by lies together for the
    columns of a sequence; ``begins`` and ``lengths`` int32 ``[columns]``: first token and number of tokens.
    """

    def __init__(self, stream: Stream, sides: list[Side], device: torch.device) -> None:
        self._stream, self._sides, self._device = stream, sides, device
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
        fields = [self._fields(number) for number in range(len(self._sides))]
        known = torch.stack([addresses for side in fields for addresses in side])
        self.addresses = known.to(self._device, non_blocking=True)[:, blocks.table]
        lengths = blocks.lengths
        spans = torch.stack([lengths.cumsum(0, dtype=torch.int32) - lengths, lengths])
        self.begins, self.lengths = spans.to(self._device, non_blocking=True)

    def of(self, number: int) -> Tensor:
        """The addresses of one segment."""
        return self.addresses[number * len(FIELDS) : (number + 1) * len(FIELDS)]

    def _fields(self, number: int) -> list[Tensor]:
        """Where each field of every block lies, int64 ``[N]``; 0 where there is none."""
        count, side = self._stream.blocks, self._sides[number]
        found = dict(self._blocks.fields[number])
        if side.fixed is not None:
            for name, given in zip(("scale", "zero"), side.fixed, strict=True):
                found[name] = torch.full((count,), given.data_ptr())
        nowhere = torch.zeros(count, dtype=torch.int64)
        return [found.get(name, nowhere) for name in FIELDS]

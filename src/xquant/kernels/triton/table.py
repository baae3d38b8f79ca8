"""Where the packed blocks of a layer lie, as the kernels look them up."""

import torch
from torch import Tensor

from ...store.stream import Stream
from .describe import Side

FIELDS = ("codes", "scale", "zero", "outlier_count", "outlier_excess", "outlier_channel")
"""In the order in which a kernel finds their addresses."""


class BlockTable:
    """By sequence and column of the table of a stream; made anew when its blocks change.

    ``addresses`` int64 ``[segments * FIELDS, B, columns]``: what a block is read by lies together for the
    columns of a sequence; ``begins`` and ``lengths`` int32 ``[columns]``: first token and number of tokens.
    """

    def __init__(self, stream: Stream, sides: list[Side], device: torch.device) -> None:
        self._stream, self._sides, self._device = stream, sides, device
        self._version = -1
        self.columns = 0
        self.addresses = torch.zeros(1, dtype=torch.int64, device=device)
        self.begins = self.lengths = torch.zeros(1, dtype=torch.int32, device=device)

    def refresh(self) -> None:
        """Point to the blocks as they are now."""
        stream = self._stream
        if stream.version == self._version:
            return
        self._version = stream.version
        self.columns = len(stream.lengths)
        if stream.table is None:
            return
        fields = [self._fields(number) for number in range(len(self._sides))]
        known = torch.stack([addresses for side in fields for addresses in side])
        self.addresses = known.to(self._device, non_blocking=True)[:, stream.table]
        lengths = torch.tensor(stream.lengths, dtype=torch.int32)
        spans = torch.stack([lengths.cumsum(0, dtype=torch.int32) - lengths, lengths])
        self.begins, self.lengths = spans.to(self._device, non_blocking=True)

    def of(self, number: int) -> Tensor:
        """The addresses of one segment."""
        return self.addresses[number * len(FIELDS) : (number + 1) * len(FIELDS)]

    def _fields(self, number: int) -> list[Tensor]:
        """Where each field of every block lies, int64 ``[N]``; 0 where there is none."""
        stream, side = self._stream, self._sides[number]
        fields = dict(stream.pool[number])
        if stream.segments[number].borrows:
            assert stream.lender is not None
            fields["codes"] = stream.lender.pool[number]["codes"]
        found = {name: blocks.addresses for name, blocks in fields.items()}
        if side.fixed is not None:
            for name, given in zip(("scale", "zero"), side.fixed, strict=True):
                found[name] = torch.full((stream.blocks,), given.data_ptr())
        nowhere = torch.zeros(stream.blocks, dtype=torch.int64)
        return [found.get(name, nowhere) for name in FIELDS]

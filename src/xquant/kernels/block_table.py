"""BlockTable: the addresses of a layer's packed blocks, on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..past.pages import PageLayout
from ..past.stream import Stream
from .addresses import BlockAddresses

FIELDS = (
    "codes",
    "scale",
    "zero",
    "outlier_count",
    "outlier_excess",
    "outlier_channel",
    "gain",
    "",
)
"""The packed fields of a segment, in the order in which a kernel finds their addresses. The last is none:
with eight of them, those of the next segment begin at a multiple of 16 bytes too. A kernel is compiled anew
where an argument ceases to."""
ALIGNED = 4
"""Numbers of int32 in 16 bytes."""
Offline = tuple[Tensor, Tensor] | None


class Blocks(NamedTuple):
    """The blocks of the sequences: see `BlockTable`."""

    addresses: Any
    """int64 ``[fields, B, columns]``."""
    begins: Any
    """int32 ``[columns]``: the first token of each, as ``lengths``, the number of its tokens."""
    lengths: Any


class BlockTable:
    """The addresses of a stream's blocks, by segment, field, sequence and column.

    Args:
        offline: scale and zero of each segment, where all blocks share them.
    """

    def __init__(self, stream: Stream, offline: Sequence[Offline], device: torch.device) -> None:
        self._stream, self._offline, self._device = stream, offline, device
        self._addresses = BlockAddresses(stream)
        self.columns = 0
        nowhere = torch.zeros(1, dtype=torch.int64, device=device)
        begins = lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.blocks = Blocks(nowhere, begins, lengths)
        """As kernels take them, with ``addresses`` ``[segments * FIELDS, B, columns]``: those of one field
        lie together for the columns of a sequence."""

    def refresh(self) -> None:
        """Point to the blocks as they are now."""
        found = self._addresses
        if not found.refresh():
            return
        self.columns = found.columns
        if found.table is None:
            return
        fields = [self._fields(number) for number in range(len(self._offline))]
        by_block = torch.stack([addresses for segment in fields for addresses in segment])
        addresses = by_block.to(self._device, non_blocking=True)[:, found.table]
        begins = found.lengths.cumsum(0, dtype=torch.int32) - found.lengths
        # Rows of a size that keeps the second where the first is: at a multiple of 16 bytes.
        spans = begins.new_zeros(2, -(-self.columns // ALIGNED) * ALIGNED)
        spans[:, : self.columns] = torch.stack([begins, found.lengths])
        self.blocks = Blocks(addresses, *spans.to(self._device, non_blocking=True))

    def segment(self, number: int) -> Blocks:
        """The blocks of one segment."""
        first = number * len(FIELDS)
        return self.blocks._replace(addresses=self.blocks.addresses[first : first + len(FIELDS)])

    def _fields(self, number: int) -> list[Tensor]:
        """The addresses of each field of every block, int64 ``[N]``; 0 where there is none."""
        count, offline = self._stream.blocks, self._offline[number]
        addresses = self._addresses.fields(number)
        if offline is not None:
            for name, shared in zip(("scale", "zero"), offline, strict=True):
                addresses[name] = torch.full((count,), shared.data_ptr(), device="cpu")
        nowhere = torch.zeros(count, dtype=torch.int64, device="cpu")
        return [addresses.get(name, nowhere) for name in FIELDS]


def page_addresses(layout: PageLayout, pages: Tensor, offline: Sequence[Offline]) -> Tensor:
    """int64 ``[segments, FIELDS, 2]``: where each field lies in page 0 of ``pages`` uint8 ``[N, .]``, and how
    far pages lie apart: not at all where all blocks share it (``offline``, as of `BlockTable`)."""
    found = [[[0, 0] for _ in FIELDS] for _ in offline]
    for place in layout.places:
        start = pages.data_ptr() + place.start
        found[place.segment][FIELDS.index(place.name)] = [start, pages.stride(0)]
    for fields, shared in zip(found, offline, strict=True):
        for name, each in zip(("scale", "zero"), shared or (), strict=False):
            fields[FIELDS.index(name)] = [each.data_ptr(), 0]
    return torch.tensor(found, dtype=torch.int64, device=pages.device)

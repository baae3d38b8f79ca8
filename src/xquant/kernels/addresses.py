"""Where the packed blocks of a layer lie in memory, for kernels that read them in place: on the host, in a
table on the device, and in pages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..past.pages import PageLayout
from ..past.stream import Stream

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


class BlockAddresses:
    """Follows the blocks of a stream: where they lie, and in which order."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._version = -1
        self.columns = 0
        """Of the table of blocks."""
        self.table: Tensor | None = None
        """int64 ``[B, columns]``: the number of each block; None while there are none."""
        self.lengths = torch.zeros(0, dtype=torch.int32, device="cpu")
        """int32 ``[columns]`` on the CPU: tokens of each block."""

    def refresh(self) -> bool:
        """Follow the stream; whether anything changed."""
        stream = self._stream
        if stream.version == self._version:
            return False
        self._version = stream.version
        self.columns = len(stream.lengths)
        self.table = None if stream.table is None else stream.table.contiguous()
        self.lengths = torch.tensor(stream.lengths, dtype=torch.int32, device="cpu")
        return True

    def fields(self, number: int) -> dict[str, Tensor]:
        """Of every block of a segment by packed field, int64 ``[N]`` on the CPU. Codes that it shares are
        those of its source layer.

        The caller keeps them for as long as a kernel points to them.
        """
        fields = dict(self._stream.here[number])
        if self._stream.segments[number].shared:
            assert self._stream.source is not None
            fields["codes"] = self._stream.source.here[number]["codes"]
        return {name: blocks.addresses for name, blocks in fields.items()}


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

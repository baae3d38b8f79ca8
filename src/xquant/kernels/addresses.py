"""BlockAddresses: where the packed blocks of a layer lie in memory, for kernels that read them in place."""

import torch
from torch import Tensor

from ..store.stream import Pool, Stream


class BlockAddresses:
    """Addresses by segment and packed field; made anew when the blocks of the stream change."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._version = -1
        self.columns = 0
        """Of the table of blocks."""
        self.table: Tensor | None = None
        """int64 ``[B, columns]``: the number of each block; None while there are none."""
        self.lengths = torch.zeros(0, dtype=torch.int32)
        """int32 ``[columns]`` on the CPU: tokens of each block."""
        self.fields: list[dict[str, Tensor]] = []
        """By segment: of every block, int64 ``[N]`` on the CPU. Codes that a segment shares are those of its
        source layer."""

    def refresh(self) -> bool:
        """Follow the stream; whether anything changed."""
        stream = self._stream
        if stream.version == self._version:
            return False
        self._version = stream.version
        self.columns = len(stream.lengths)
        self.table = None if stream.table is None else stream.table.contiguous()
        self.lengths = torch.tensor(stream.lengths, dtype=torch.int32)
        self.fields = [
            {name: blocks.addresses for name, blocks in self._segment(number).items()}
            for number in range(len(stream.pool))
        ]
        return True

    def _segment(self, number: int) -> Pool:
        fields = dict(self._stream.pool[number])
        if self._stream.segments[number].shared:
            assert self._stream.source is not None
            fields["codes"] = self._stream.source.pool[number]["codes"]
        return fields

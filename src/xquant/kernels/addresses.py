"""BlockAddresses: where the packed blocks of a layer lie in memory, for kernels that read them in place."""

import torch
from torch import Tensor

from ..past.stream import Stream


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

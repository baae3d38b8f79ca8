"""Streams: the bytes of packed fields, put so that those beside each other are distributed alike.

An entropy coder of bytes gains little on mixed ones. A number of a float type has an exponent that says
much, and a mantissa that says nothing; codes of 3 bits do not end with a byte.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pack import pack, packed_rows, planes, unpack

_PAIRED = 3


class Streams:
    """How a tensor is taken apart: numbers of a float type into their first bytes, second bytes and so on;
    any other as it is."""

    def apart(self, tensor: Tensor) -> list[Tensor]:
        """Streams of bytes, uint8 ``[.]`` each; in all they may be more than the tensor has."""
        data = tensor.contiguous().flatten().view(torch.uint8)
        if not tensor.is_floating_point():
            return [data]
        return list(data.view(-1, tensor.itemsize).T.contiguous())

    def together(self, data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The tensor of this type and shape, of whose streams ``data`` ``[.]`` are the bytes.

        Raises:
            ValueError: there are more or fewer of them.
        """
        check_length(data, math.prod(shape) * dtype.itemsize)
        if dtype.is_floating_point:
            data = data.view(dtype.itemsize, -1).T.contiguous().flatten()
        return data.view(dtype).view(tuple(shape))


@dataclass(frozen=True)
class RunStreams(Streams):
    """Of runs of packed codes, uint8 ``[N, bytes]``: one for each width.

    Codes of 1, 2, 4 and 8 bits stay packed, since a byte holds whole ones of one channel; two of 3 bits, and
    one of any other width, take a byte.

    Args:
        runs: bits of a code, codes of a channel (a multiple of 8) and channels of each run, as they lie in a
            block.
    """

    runs: tuple[tuple[int, int, int], ...]

    def apart(self, tensor: Tensor) -> list[Tensor]:
        sizes = [packed_rows(count, bits) * channels for bits, count, channels in self.runs]
        found = []
        for (bits, count, channels), run in zip(self.runs, tensor.split(sizes, 1), strict=True):
            if len(planes(bits)) > 1:
                run = unpack(run.unflatten(1, (-1, channels)), bits, count)
                if bits == _PAIRED:
                    run = run[:, 0::2] | run[:, 1::2] << bits
            found.append(run.flatten())
        return found

    def together(self, data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        blocks = shape[0]
        sizes = [blocks * _stream_rows(bits, count) * channels for bits, count, channels in self.runs]
        check_length(data, sum(sizes))
        found = []
        for (bits, _, channels), run in zip(self.runs, data.split(sizes), strict=True):
            run = run.view(blocks, -1, channels)
            if bits == _PAIRED:
                run = torch.stack([run & (1 << bits) - 1, run >> bits], 2).flatten(1, 2)
            if len(planes(bits)) > 1:
                run = pack(run, bits)
            found.append(run.flatten(1))
        return torch.cat(found, 1) if found else data.view(tuple(shape))


def _stream_rows(bits: int, count: int) -> int:
    """Bytes of a channel in its stream."""
    if len(planes(bits)) == 1:
        return packed_rows(count, bits)
    return count // 2 if bits == _PAIRED else count


def check_length(data: Tensor, wanted: int) -> None:
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes where {wanted} are expected")

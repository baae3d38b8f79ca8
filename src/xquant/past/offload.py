"""Offloader: packed blocks that are kept in host memory, and brought to their device a layer ahead of use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..quant import Packed, Ragged
from .slabs import Slabs
from .stream import Pool, Stream


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


@dataclass
class _Copy:
    """The blocks of a stream on their device."""

    pools: list[Pool]
    version: int
    """Of the stream that was copied."""
    done: Any
    """An event after which they are there; None where they are there at once."""


class Offloader:
    """Keeps copies of what streams hold in host memory, for the layer that is read and the one after it.

    On a GPU a layer's blocks travel on a CUDA stream of their own, while the layer before computes.

    Args:
        streams: of the layers, bottom up.
        devices: on which each is read.
    """

    def __init__(self, streams: Sequence[Stream], devices: Sequence[torch.device]) -> None:
        self._streams = list(streams)
        self._devices = dict(zip(self._streams, devices, strict=True))
        self._copies: dict[Stream, _Copy] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        for stream in self._streams:
            stream.offloader = self

    def enter(self, place: int) -> None:
        """A forward pass has come to the layer at this place: drop what was read, send for what is next."""
        wanted = [self._streams[at % len(self._streams)] for at in (place, place + 1)]
        self._copies = {s: copy for s, copy in self._copies.items() if s in wanted}
        for stream in wanted:
            if not self._is_here(stream):
                self._fetch(stream)

    def bring(self, stream: Stream) -> list[Pool]:
        """The blocks of a stream on its device."""
        if not self._is_here(stream):
            self._fetch(stream)
        copy = self._copies[stream]
        if copy.done is not None:
            torch.cuda.current_stream(self._devices[stream]).wait_event(copy.done)
        return copy.pools

    def to_host(self, packed: list[Packed]) -> list[Packed]:
        """New blocks, in host memory."""
        return [
            {
                name: held.moved(_to_host) if isinstance(held, Ragged) else _to_host(held)
                for name, held in fields.items()
            }
            for fields in packed
        ]

    @property
    def copied(self) -> int:
        """Streams of which there is a copy."""
        return len(self._copies)

    def _is_here(self, stream: Stream) -> bool:
        copy = self._copies.get(stream)
        return copy is not None and copy.version == stream.version

    def _fetch(self, stream: Stream) -> None:
        device, done = self._devices[stream], None
        if device.type == "cuda":
            if device not in self._sides:
                self._sides[device] = torch.cuda.Stream(device)
            side = self._sides[device]
            now = torch.cuda.current_stream(device)
            side.wait_stream(now)
            with torch.cuda.stream(side):
                pools = _copied(stream.pool, device)
                done = side.record_event()
            for tensor in _tensors(pools):
                tensor.record_stream(now)
        else:
            pools = _copied(stream.pool, device)
        stream.version += 1  # kernels look where blocks are
        self._copies[stream] = _Copy(pools, stream.version, done)


def _copied(pools: list[Pool], device: torch.device) -> list[Pool]:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True, copy=True)

    return [{name: held.moved(move) for name, held in fields.items()} for fields in pools]


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor)


def _tensors(pools: list[Pool]) -> list[Tensor]:
    held = [blocks for fields in pools for blocks in fields.values()]
    return [t for each in held for t in (each.parts() if isinstance(each, Slabs) else each.blocks)]

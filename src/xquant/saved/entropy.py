"""Entropy coding of a saved cache: zstd over bytes that are distributed alike (`quant.streams`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quant import Streams

LEVEL = 1
"""Of zstd: past it, only what repeats is found better, and codes do not repeat."""
MOST = 8
"""Times its own size that a coded tensor may have decoded, so that a small file takes no large memory."""
LEAST = 0.99
"""Of its size that a tensor may have coded; one that stays larger is stored as it is."""

Coded = dict[str, list[Any]]
"""The type and shape of each tensor that is coded, by name."""
_EVERY = Streams()


def require() -> Any:
    """The library.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "entropy coding needs zstandard: in a clone, pip install '.[entropy]'"
        ) from None
    return zstandard


def code(tensors: Mapping[str, Tensor], streams: Mapping[str, Streams]) -> tuple[dict[str, Tensor], Coded]:
    """Tensors, coded where that pays, and what those were.

    Args:
        streams: how a tensor is taken apart, where not in the usual way.
    """
    coder = require().ZstdCompressor(level=LEVEL)
    found, coded = dict(tensors), Coded()
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        parts = streams.get(name, _EVERY).apart(tensor)
        frames = b"".join(coder.compress(part.contiguous().numpy().data) for part in parts)
        decoded = sum(map(len, parts))
        if len(frames) <= LEAST * tensor.nbytes and decoded <= MOST * len(frames):
            found[name] = torch.frombuffer(bytearray(frames), dtype=torch.uint8)
            coded[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    return found, coded


def decode(frames: Tensor, dtype: torch.dtype, shape: Sequence[int], streams: Streams = _EVERY) -> Tensor:
    """The tensor that was coded as these frames, uint8 ``[.]``.

    Raises:
        ValueError: they are none of a tensor of this type and shape.
    """
    zstandard = require()
    most = MOST * len(frames)
    try:
        with zstandard.ZstdDecompressor().stream_reader(
            frames.numpy().data, read_across_frames=True
        ) as reader:
            data = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)[:160]) from None
    if len(data) > most:
        raise ValueError("it is far larger than what it was coded to")
    held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else frames[:0]
    return streams.together(held, dtype, shape)

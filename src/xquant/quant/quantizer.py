"""Quantizers: how one segment of channels of a sealed block is stored.

A quantizer turns a batch of blocks ``[N, n, C]`` (``N`` blocks of ``n`` tokens) into named tensors
whose first dimension is ``N``, and back. ``nbytes`` states what one block takes; the tests hold it
against what the tensors really hold.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .affine import FP16_MAX, dequantize, quantize
from .pack import pack, packed_rows, unpack

Packed = dict[str, Tensor]
Granularity = Literal["token", "channel"]


class Quantizer(Protocol):
    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        """Blocks ``[N, n, C]`` to tensors of leading dimension ``N``; see :func:`quantize`."""
        ...

    def decode(self, packed: Packed, out: Tensor) -> None:
        """Back to rows, written into ``out`` ``[N, n, C]``."""
        ...

    def nbytes(self, tokens: int, channels: int) -> int:
        """Bytes that one block of ``tokens`` x ``channels`` takes."""
        ...


@dataclass(frozen=True)
class Plain:
    """No quantization: rows are stored in ``dtype``, which is the identity for the model's own."""

    dtype: torch.dtype

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        if self.dtype == torch.float16:
            x = x.clamp(-FP16_MAX, FP16_MAX)
        return {"values": x.to(self.dtype, copy=True)}

    def decode(self, packed: Packed, out: Tensor) -> None:
        out.copy_(packed["values"])

    def nbytes(self, tokens: int, channels: int) -> int:
        return tokens * channels * self.dtype.itemsize


@dataclass(frozen=True)
class Affine:
    """Asymmetric uniform codes of ``bits`` bits with fp16 scale and zero per group.

    ``per="token"``: as few groups of at most ``group`` channels within a token as there can be, all of
    one size (the last may be shorter): 192 channels in groups of 128 are twice 96. ``per="channel"``:
    groups of ``group`` tokens within a channel.
    """

    bits: int
    per: Granularity
    group: int

    @property
    def _dim(self) -> int:
        return -1 if self.per == "token" else -2

    def _size(self, x: Tensor) -> int:
        if self.per == "channel":
            return self.group
        channels = x.shape[-1]
        return -(-channels // -(-channels // self.group))

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        codes, scale, zero = quantize(x, self.bits, self._dim, self._size(x), excluded)
        return {"codes": pack(codes, self.bits), "scale": scale, "zero": zero}

    def decode(self, packed: Packed, out: Tensor) -> None:
        codes = unpack(packed["codes"], self.bits, out.shape[-2])
        dequantize(codes, packed["scale"], packed["zero"], self._dim, self._size(out), out)

    def nbytes(self, tokens: int, channels: int) -> int:
        along, across = (channels, tokens) if self.per == "token" else (tokens, channels)
        groups = -(-along // self.group) * across
        return packed_rows(tokens, self.bits) * channels + groups * (2 + 2)


@dataclass(frozen=True)
class Segment:
    """A run of neighbouring channels stored by one quantizer."""

    channels: int
    quantizer: Quantizer

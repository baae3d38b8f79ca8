"""Quantizers whose codes share a range (a scale and a zero point) by groups: what they have in common, and
affine codes."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from .affine import dequantize, quantize
from .operand import Operand
from .pack import Tile, pack, packed_rows, unpack
from .quantizer import Field, Granularity, Packed, Quantizer, dense


@dataclass(frozen=True)
class Grouped(Quantizer):
    """Codes of ``bits`` bits with a range per group.

    ``per="token"``: as few groups of at most ``group`` channels within a token as there can be, all of
    one size (the last may be shorter): 192 channels in groups of 128 are twice 96. ``per="channel"``:
    groups of ``group`` tokens within a channel. 0 is the whole token, or the block.

    ``tile`` orders the codes of a whole block for the kernels; None leaves them in rows.
    """

    bits: int
    per: Granularity
    group: int
    tile: Tile | None = field(default=None, kw_only=True)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes ``[N, n, C]`` as they are stored."""
        if self.tile is not None and self.tile.fits(codes.shape[-2]):
            return self.tile.pack(codes, self.bits)
        return pack(codes, self.bits)

    def unpack(self, packed: Tensor, tokens: int, channels: int) -> Tensor:
        """The inverse of `pack`: ``[N, tokens, channels]``."""
        if self.tile is None or not self.tile.fits(tokens):
            return unpack(packed, self.bits, tokens)
        return self.tile.unpack(packed, self.bits, tokens, channels)

    def in_tiles(self, tokens: int) -> bool:
        """Whether the codes of blocks of ``tokens`` lie in tiles."""
        return self.tile is not None and self.tile.fits(tokens)

    def _by_range(self, tokens: int) -> bool:
        """Whether ranges per token lie range by range ``[N, ranges, n]``, next to tiles."""
        return self.per == "token" and self.in_tiles(tokens)

    def _pack_range(self, ranges: Tensor) -> Tensor:
        """What is stored of scales or zeros: ``[N, tokens, ranges]`` per token, else ``[N, ranges, C]``."""
        return ranges.mT.contiguous() if self._by_range(ranges.shape[-2]) else ranges

    def _unpack_range(self, packed: Packed, name: str, tokens: int) -> Tensor:
        """The inverse of `_pack_range`."""
        ranges = dense(packed, name)
        return ranges.mT if self._by_range(tokens) else ranges

    def _pack_ranges(self, scale: Tensor, zero: Tensor) -> Packed:
        return {"scale": self._pack_range(scale), "zero": self._pack_range(zero)}

    def unpack_ranges(self, packed: Packed, tokens: int) -> tuple[Tensor, Tensor]:
        """Scale and zero of blocks: ``[N, tokens, ranges]`` per token, ``[N, ranges, C]`` per channel."""
        scale, zero = (self._unpack_range(packed, name, tokens) for name in ("scale", "zero"))
        return scale, zero

    @property
    def _dim(self) -> int:
        return -1 if self.per == "token" else -2

    def range_size(self, along: int) -> int:
        """Elements of a range along an axis of this length."""
        if self.group == 0:
            return along
        return -(-along // -(-along // self.group)) if self.per == "token" else self.group

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        """``codes`` (uint8), as `pack` leaves them, ``scale`` and ``zero`` (fp16), as `unpack_ranges` reads
        them.

        Raises:
            ValueError: the channels are not whole tiles.
        """
        codes: tuple[int, ...] = packed_rows(tokens, self.bits), channels
        if self.tile is not None and self.in_tiles(tokens):
            codes = self.tile.packed_shape(tokens, channels, self.bits)
        if self.per == "channel":
            shape = -(-tokens // self.range_size(tokens)), channels
        else:
            count = -(-channels // self.range_size(channels))
            shape = (count, tokens) if self._by_range(tokens) else (tokens, count)
        ranges = Field(shape, torch.float16, "ranges")
        return {"codes": Field(codes, torch.uint8, "codes"), "scale": ranges, "zero": ranges}

    def operand(self, tokens: int, channels: int) -> Operand:
        per_token = self.per == "token"
        group = self.range_size(channels if per_token else tokens)
        return Operand(channels, self.bits, per_token, group, self.tile)

    def tiled(self, head: int, lanes: Literal["tokens", "channels"]) -> Self:
        return replace(self, tile=Tile(head, lanes))


@dataclass(frozen=True)
class Affine(Grouped):
    """Asymmetric uniform codes of ``bits`` bits with fp16 scale and zero per group; see `affine`."""

    eta: float = 0.0

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        size = self.range_size(x.shape[self._dim])
        codes, scale, zero = quantize(x, self.bits, self._dim, size, excluded, self.eta)
        return {"codes": self.pack(codes), **self._pack_ranges(scale, zero)}

    def decode(self, packed: Packed, out: Tensor) -> None:
        codes = self.unpack(dense(packed, "codes"), *out.shape[-2:])
        size = self.range_size(out.shape[self._dim])
        scale, zero = self.unpack_ranges(packed, out.shape[-2])
        dequantize(codes, scale, zero, self._dim, size, out)

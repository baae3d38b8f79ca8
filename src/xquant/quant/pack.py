"""Bit packing: ``b``-bit codes take ``b`` bits.

A width is stored as planes of 4, 2 and 1 bits (3 = 2 + 1), so every width from 1 to 8 packs without
waste. Within a plane of width ``w`` the block's tokens are cut into ``8 / w`` equal runs and one byte
holds the same place of each run: unpacking is a shift and a mask over whole rows of channels.

Codes that a kernel reads are put in tiles first (`Tile`), so that integer dot products need no shuffles.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_PLANES = (8, 4, 2, 1)


def planes(bits: int) -> tuple[int, ...]:
    """Widths of the planes that hold a ``bits``-bit code, low bits first: ``3 -> (2, 1)``.

    Raises:
        ValueError: ``bits`` is not between 1 and 8.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    return tuple(w for w in _PLANES if bits & w)


def packed_rows(tokens: int, bits: int) -> int:
    """Bytes per channel that ``tokens`` codes of ``bits`` bits take, each plane rounded up."""
    return sum(-(-tokens * w // 8) for w in planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` (uint8, ``[..., T, C]``, each below ``2**bits``) to uint8 ``[..., rows, C]``."""
    tokens = codes.shape[-2]
    packed, shift = [], 0
    for width in planes(bits):
        per_byte = 8 // width
        rows = -(-tokens // per_byte)
        plane = (codes >> shift) & (2**width - 1)
        plane = torch.nn.functional.pad(plane, (0, 0, 0, rows * per_byte - tokens))
        runs = plane.unflatten(-2, (per_byte, rows)).unbind(-3)
        byte = runs[0].clone()
        for j, run in enumerate(runs[1:], 1):
            byte |= run << (j * width)
        packed.append(byte)
        shift += width
    return packed[0] if len(packed) == 1 else torch.cat(packed, -2)


def unpack(packed: Tensor, bits: int, tokens: int) -> Tensor:
    """The inverse of :func:`pack`: uint8 codes ``[..., T, C]`` with ``T = tokens``."""
    codes, start, shift = None, 0, 0
    for width in planes(bits):
        per_byte = 8 // width
        rows = -(-tokens // per_byte)
        plane = packed.narrow(-2, start, rows)
        if per_byte > 1:
            mask = 2**width - 1
            runs = [plane & mask]
            runs += [(plane >> (j * width)) & mask for j in range(1, per_byte - 1)]
            runs.append(plane >> (8 - width))
            plane = torch.cat(runs, -2).narrow(-2, 0, tokens)
        codes = plane if codes is None else codes | (plane << shift)
        start, shift = start + rows, shift + width
    assert codes is not None
    return codes


def channel_order(size: int) -> list[int]:
    """The channels of a head in the order in which a tile sums over them.

    Tiles are unpacked by units of 32 channels, half of them from each half of the head. Up to 24 channels
    are left, the rest: quads of them, by turns from the first half and from the second. Kernels find the two
    channels of a rotation near each other so.
    """
    half, in_units = size // 2, size // 32 * 16
    rest = range(in_units, half, 4)
    quads = [start + upper for start in rest for upper in (0, half)]
    in_rest = [quad + i for quad in quads for i in range(4)]
    return [*range(in_units), *range(half, half + in_units), *in_rest]


@dataclass(frozen=True)
class Tile:
    """The order of the codes of a block ``[n, C]`` for a kernel that sums over one of its axes.

    Codes lie in tiles of 16 lanes ``[K/4, 16, 4]``, ``K`` the axis that is summed over. For keys (``lanes``
    are tokens) these are the channels of a head, each of which lies by itself: ``[C/head, n/16, K/4, 64]``,
    ``K`` in `channel_order`. For values (``lanes`` are channels) these are tokens: ``[C/head, head/16, n/4,
    64]``, or ``[1, C/16, n/4, 64]`` where tiles hold channels of two heads, zeros after the last.
    """

    head: int
    lanes: Literal["tokens", "channels"]

    def fits(self, tokens: int) -> bool:
        """Whether a block of ``tokens`` divides into whole tiles; others are packed as they are."""
        return tokens % 32 == 0 and self.head % 8 == 0

    @property
    def whole(self) -> bool:
        """Whether heads are whole units of 32 channels: nothing is left, and no tile has two heads."""
        return self.head % 32 == 0

    @property
    def _rest(self) -> int:
        """Quads of a head that are packed by themselves."""
        return self.head % 32 // 4 if self.lanes == "tokens" else 0

    def packed_shape(self, tokens: int, channels: int, bits: int) -> tuple[int, ...]:
        """What `pack` makes of a block ``[n, C]``.

        Raises:
            ValueError: the channels are not whole heads.
        """
        if channels % self.head:
            raise ValueError(f"{channels} channels are not whole tiles of {self.head}")
        heads = channels // self.head
        if self.lanes == "channels":
            outer = (1, -(-channels // 16)) if self.head % 16 else (heads, self.head // 16)
            return *outer, packed_rows(tokens // 4, bits), 64
        tiles, rows = tokens // 16, packed_rows(self.head // 32 * 8, bits)
        if not self._rest:
            return heads, tiles, rows, 64
        return heads, tiles * rows + packed_rows(tiles * self._rest, bits), 64

    def arrange(self, codes: Tensor) -> Tensor:
        """Codes ``[..., n, C]`` as tiles ``[..., C/head, M/16, K/4, 64]``."""
        if self.lanes == "channels" and self.head % 16:
            codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 16)).unsqueeze(-3)
        else:
            codes = codes.unflatten(-1, (-1, self.head)).movedim(-2, -3)
        if self.lanes == "channels":
            codes = codes.transpose(-1, -2)
        elif self._rest:
            codes = codes[..., channel_order(self.head)]
        tiles = codes.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 16)).transpose(-3, -2)
        return tiles.flatten(-2)

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Codes ``[..., n, C]`` as they are stored, ``[..., *packed_shape]``."""
        tiles = self.arrange(codes)
        if not self._rest:
            return pack(tiles, bits)
        units, rest = tiles.split([self.head // 32 * 8, self._rest], -2)
        parts = pack(units, bits).flatten(-3, -2), pack(rest.flatten(-3, -2), bits)
        return torch.cat(parts, -2)

    def rows(self, packed: Tensor, bits: int, tokens: int, channels: int) -> Tensor:
        """The codes of a block ``[n, C]`` that `pack` was given, by lane: ``[..., C/head, M, K]``."""
        if not self._rest:
            summed = self.head if self.lanes == "tokens" else tokens
            rows = _by_lane(unpack(packed, bits, summed // 4))
            if self.lanes == "tokens" or self.head % 16 == 0:
                return rows
            return rows.squeeze(-3)[..., :channels, :].unflatten(-2, (-1, self.head))
        tiles, count = tokens // 16, self.head // 32 * 8
        size = tiles * packed_rows(count, bits)
        units = unpack(packed[..., :size, :].unflatten(-2, (tiles, -1)), bits, count)
        rest = unpack(packed[..., size:, :], bits, tiles * self._rest).unflatten(-2, (tiles, -1))
        rows = _by_lane(torch.cat([units, rest], -2))
        places = sorted(range(self.head), key=channel_order(self.head).__getitem__)
        return rows[..., places]

    def unpack(self, packed: Tensor, bits: int, tokens: int, channels: int) -> Tensor:
        """The inverse of `pack`."""
        heads = self.rows(packed, bits, tokens, channels)
        if self.lanes == "channels":
            heads = heads.transpose(-1, -2)
        return heads.movedim(-3, -2).flatten(-2)


def _by_lane(tiles: Tensor) -> Tensor:
    """Codes in tiles ``[..., M/16, K/4, 64]`` as ``[..., M, K]``."""
    # Four codes move as one word.
    words = tiles.view(torch.int32).transpose(-1, -2).contiguous()
    return words.view(torch.uint8).flatten(-3, -2)

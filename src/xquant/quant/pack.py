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


@dataclass(frozen=True)
class Tile:
    """The order of the codes of a block ``[n, C]`` for a kernel that sums over one of its axes.

    Each head of ``head`` channels lies by itself, in tiles of 16 lanes: ``[C/head, M/16, K/4, 16, 4]``,
    ``M`` the axis of the lanes and ``K`` the one that is summed over: channels for keys (``lanes`` are
    tokens), tokens for values (``lanes`` are channels).
    """

    head: int
    lanes: Literal["tokens", "channels"]

    def fits(self, tokens: int) -> bool:
        """Whether a block of ``tokens`` divides into whole tiles; others are packed as they are."""
        return tokens % 32 == 0 and self.head % 32 == 0

    def shape(self, tokens: int, channels: int) -> tuple[int, int, int, int]:
        """What `arrange` makes of a block ``[n, C]``: ``[C/head, M/16, K/4, 64]``.

        Raises:
            ValueError: the channels are not whole heads.
        """
        if channels % self.head:
            raise ValueError(f"{channels} channels are not whole tiles of {self.head}")
        by_token = self.lanes == "tokens"
        lanes, summed = (tokens, self.head) if by_token else (self.head, tokens)
        return channels // self.head, lanes // 16, summed // 4, 64

    def arrange(self, codes: Tensor) -> Tensor:
        """Codes ``[..., n, C]`` as ``[..., C/head, M/16, K/4, 64]``."""
        heads = codes.unflatten(-1, (-1, self.head)).movedim(-2, -3)
        if self.lanes == "channels":
            heads = heads.transpose(-1, -2)
        tiles = heads.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 16)).transpose(-3, -2)
        return tiles.flatten(-2)

    def rows(self, tiles: Tensor) -> Tensor:
        """Codes of `arrange` by lane, ``[..., C/head, M, K]``."""
        # Four codes move as one word.
        words = tiles.view(torch.int32).transpose(-1, -2).contiguous()
        return words.view(torch.uint8).flatten(-3, -2)

    def restore(self, tiles: Tensor) -> Tensor:
        """The inverse of `arrange`."""
        heads = self.rows(tiles)
        if self.lanes == "channels":
            heads = heads.transpose(-1, -2)
        return heads.movedim(-3, -2).flatten(-2)

"""Blocks packed and unpacked by the native library, in one go: csrc/seal.h, decode.h and ranked_seal.h.

It equals `Affine` and `Ranked` in torch, bit for bit but for the sign of a zero, which torch leaves to the
order in which it looks for the lowest.
"""

from typing import Any

import torch
from torch import Tensor

from ...quant import Affine, Packed, Quantizer
from ...quant.pack import packed_rows
from ...quant.quantizer import dense
from ...quant.ranked import Ranked, border_table, edge_table, level_table, size_table
from ...store.packer import Packer
from . import library as native

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class NativePacker(Packer):
    """Packs with the library's functions for the instruction set ``path``; what they do not know, with
    torch."""

    def __init__(self, path: str) -> None:
        self._path = path

    def pack(self, quantizer: Quantizer, x: Tensor, excluded: Tensor | None) -> Packed:
        own = _KNOWN.get(type(quantizer)) if _within_reach(x) else None
        if own is None:
            return super().pack(quantizer, x, excluded)
        rows = x if x.stride(-1) == 1 else x.contiguous()
        hidden = None if excluded is None else excluded.contiguous()
        found: Packed = own[0](self._path, quantizer, rows, hidden)
        return found

    def unpack(self, quantizer: Quantizer, packed: Packed, out: Tensor) -> None:
        own = _KNOWN.get(type(quantizer)) if _within_reach(out) else None
        if own is None or out.stride(-1) != 1:
            return super().unpack(quantizer, packed, out)
        fields = {name: dense(packed, name).contiguous() for name in packed}
        own[1](self._path, quantizer, fields, out)


def _within_reach(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in _FLOATS and rows.numel() > 0


def pack_affine(path: str, quantizer: Affine, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN in a token that sets a range.
    """
    codes_shape, ranges_shape = _shapes(quantizer, *x.shape[1:])
    codes = torch.empty(len(x), *codes_shape, dtype=torch.uint8)
    scale, zero = (torch.empty(len(x), *ranges_shape, dtype=torch.float16) for _ in range(2))
    packed: Packed = {"codes": codes, "scale": scale, "zero": zero}
    _call("seal", path, quantizer, x, packed, excluded)
    return packed


def unpack_affine(path: str, quantizer: Affine, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``, from contiguous fields."""
    _call("decode", path, quantizer, out, packed, None)


def _head(quantizer: Affine, tokens: int) -> int:
    """Channels of a head where a block's codes are in tiles, otherwise 0."""
    tile = quantizer.tile
    return tile.head if tile is not None and tile.fits(tokens) else 0


def _shapes(quantizer: Affine, tokens: int, channels: int) -> tuple[list[int], list[int]]:
    """Of the codes and of the ranges of one block."""
    head, bits = _head(quantizer, tokens), quantizer.bits
    if head:
        assert quantizer.tile is not None
        if channels % head:
            raise ValueError(f"{channels} channels are not whole tiles of {head}")
        lanes, summed = (tokens, head) if quantizer.tile.lanes == "tokens" else (head, tokens)
        codes = [channels // head, lanes // 16, packed_rows(summed // 4, bits), 64]
    else:
        codes = [packed_rows(tokens, bits), channels]
    if quantizer.per == "channel":
        return codes, [-(-tokens // quantizer.range_size(tokens)), channels]
    ranges = -(-channels // quantizer.range_size(channels))
    return codes, [ranges, tokens] if head else [tokens, ranges]


def _call(
    what: str, path: str, quantizer: Affine, rows: Tensor, packed: Packed, hidden: Tensor | None
) -> None:
    call = native.Blocks()
    blocks, tokens, channels = rows.shape
    codes, ranges = _shapes(quantizer, tokens, channels)
    call.codes = native.address(dense(packed, "codes"), torch.uint8, blocks, *codes)
    for name in ("scale", "zero"):
        setattr(call, name, native.address(dense(packed, name), torch.float16, blocks, *ranges))
    call.rows = rows.data_ptr()
    if hidden is not None:
        call.hidden = native.address(hidden, torch.bool, blocks, tokens)
    call.block_stride, call.token_stride, _ = rows.stride()
    call.blocks, call.tokens, call.channels = blocks, tokens, channels
    call.dtype, call.bits = native.DTYPES[rows.dtype], quantizer.bits
    call.per_token = quantizer.per == "token"
    call.group = quantizer.range_size(call.channels if call.per_token else call.tokens)
    call.head = _head(quantizer, call.tokens)
    call.channel_lanes = quantizer.tile is not None and quantizer.tile.lanes == "channels"
    call.threads = torch.get_num_threads()
    call.zero_shift = quantizer.eta * (2**quantizer.bits - 1)
    call.scale_share = 1 - 2 * quantizer.eta
    native.pack_or_unpack(f"{what}_{path}", call)


def pack_ranked(path: str, quantizer: Ranked, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN, or tensors that do not fit each other.
    """
    sizes = _ranked_sizes(quantizer, *x.shape[1:])
    packed: Packed = {n: torch.empty(len(x), s, dtype=torch.uint8) for n, s in sizes.items()}
    rows = x.float()
    call = _ranked_call(quantizer, rows, packed, edge_table())
    borders, _ = border_table()
    call.borders = borders.data_ptr()
    if excluded is not None:
        call.hidden = native.address(excluded, torch.bool, *x.shape[:2])
    native.pack_or_unpack(f"rank_{path}", call)
    return packed


def unpack_ranked(path: str, quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``, from contiguous fields.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    native.pack_or_unpack(f"ranked_{path}", _ranked_call(quantizer, out, packed, level_table()))


def _ranked_sizes(quantizer: Ranked, tokens: int, channels: int) -> dict[str, int]:
    """Bytes of each field of a block."""
    return {
        "scale": packed_rows(channels, 4),
        "gain": packed_rows(tokens, 4),
        "codes": quantizer.code_nbytes(tokens),
    }


def _ranked_call(quantizer: Ranked, rows: Tensor, packed: Packed, table: Tensor) -> native.Ranked:
    call = native.Ranked()
    blocks, tokens, channels = rows.shape
    field_sizes = _ranked_sizes(quantizer, tokens, channels)
    for name, size in field_sizes.items():
        setattr(call, name, native.address(dense(packed, name), torch.uint8, blocks, size))
    sizes, zero = size_table()
    call.usual = native.address(quantizer.usual, torch.int16, channels)
    call.rows, call.levels, call.sizes = (t.data_ptr() for t in (rows, table, sizes[zero:]))
    call.block_stride, call.token_stride, _ = rows.stride()
    call.code_bytes = field_sizes["codes"]
    call.counts[:] = quantizer.counts
    call.blocks, call.tokens, call.channels = blocks, tokens, channels
    call.dtype, call.threads = native.DTYPES[rows.dtype], torch.get_num_threads()
    return call


_KNOWN: dict[type, tuple[Any, Any]] = {
    Affine: (pack_affine, unpack_affine),
    Ranked: (pack_ranked, unpack_ranked),
}
"""The quantizers whose arithmetic the library has, of these classes and no other: one that is derived from
them may do something else."""

"""Ranked codes packed and unpacked by the native library, bit for bit as `Ranked` does."""

import torch
from torch import Tensor

from ...quant import Packed
from ...quant.pack import packed_rows
from ...quant.quantizer import dense
from ...quant.ranked import Ranked, border_table, edge_table, level_table, size_table
from . import library as native


def encode(path: str, quantizer: Ranked, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN, or tensors that do not fit each other.
    """
    sizes = _sizes(quantizer, *x.shape[1:])
    packed: Packed = {n: torch.empty(len(x), s, dtype=torch.uint8) for n, s in sizes.items()}
    rows = x.float()
    call = _described(quantizer, rows, packed, edge_table())
    borders, _ = border_table()
    call.borders = borders.data_ptr()
    if excluded is not None:
        call.excluded = native.address(excluded, torch.bool, *x.shape[:2])
    native.pack_or_unpack(f"ranked_encode_{path}", call)
    return packed


def decode(path: str, quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``, from contiguous fields.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    native.pack_or_unpack(
        f"ranked_decode_{path}", _described(quantizer, out, packed, level_table())
    )


def _sizes(quantizer: Ranked, tokens: int, channels: int) -> dict[str, int]:
    """Bytes of each field of a block."""
    return {
        "scale": packed_rows(channels, 4),
        "gain": packed_rows(tokens, 4),
        "codes": quantizer.code_nbytes(tokens),
    }


def _described(
    quantizer: Ranked, rows: Tensor, packed: Packed, table: Tensor
) -> native.RankedBlocks:
    call = native.RankedBlocks()
    blocks, tokens, channels = rows.shape
    field_sizes = _sizes(quantizer, tokens, channels)
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

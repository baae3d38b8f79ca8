"""Ranked codes packed and unpacked by the native library, bit for bit as `Ranked` does."""

import torch
from torch import Tensor

from ..quant import Packed
from ..quant.pack import packed_rows
from ..quant.quantizer import dense
from ..quant.ranked import Ranked, border_table, edge_table, level_table, size_table
from . import native


def encode(path: str, quantizer: Ranked, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN.
    """
    blocks, tokens, channels = x.shape
    sizes = {
        "scale": packed_rows(channels, 4),
        "gain": packed_rows(tokens, 4),
        "codes": quantizer.code_nbytes(tokens),
    }
    packed: Packed = {n: torch.empty(blocks, s, dtype=torch.uint8) for n, s in sizes.items()}
    rows = x.float()
    call = _described(quantizer, rows, packed, edge_table())
    borders, _ = border_table()
    call.borders = borders.data_ptr()
    call.hidden = None if excluded is None else excluded.data_ptr()
    native.pack_or_unpack(f"rank_{path}", call)
    return packed


def decode(path: str, quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``, from contiguous fields."""
    native.pack_or_unpack(f"ranked_{path}", _described(quantizer, out, packed, level_table()))


def _described(quantizer: Ranked, rows: Tensor, packed: Packed, table: Tensor) -> native.Ranked:
    call = native.Ranked()
    for name in ("scale", "gain", "codes"):
        setattr(call, name, dense(packed, name).data_ptr())
    sizes, zero = size_table()
    call.rows, call.usual, call.levels = (t.data_ptr() for t in (rows, quantizer.usual, table))
    call.sizes = sizes[zero:].data_ptr()
    call.block_stride, call.token_stride, _ = rows.stride()
    call.code_bytes = dense(packed, "codes").shape[1]
    call.counts[:] = quantizer.counts
    call.blocks, call.tokens, call.channels = rows.shape
    call.dtype, call.threads = native.DTYPES[rows.dtype], torch.get_num_threads()
    return call

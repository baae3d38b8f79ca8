"""Quantizers by the native library, where it can: affine codes on the CPU, packed and unpacked in one go, and
ranked codes, whose scales and gains torch finds.

The result is that of the quantizer in torch, bit for bit, but for the sign of a zero, which torch leaves to
the order in which it looks for the lowest.
"""

import ctypes
from typing import TypeGuard

import torch
from torch import Tensor

from ..quant import Affine, Packed, Quantizer
from ..quant.pack import packed_rows
from ..quant.quantizer import dense
from ..quant.ranked import Ranked, edge_table, level_table, size_table
from . import native
from .gpu import support as triton
from .gpu import triton_encode

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHED = 2**18
"""Elements of the rows that are in the works at a time."""
_FOUND_NAN = 1  # as in cpu/packing.h


def instruction_set(kernel: str) -> str | None:
    """What a cache of this ``kernel`` seals with; None for torch. With any, blocks on a GPU are sealed by
    Triton where it is there."""
    if kernel == triton.NAME:
        return kernel
    available = () if native.library() is None else native.paths()
    if kernel == "auto":
        return next(iter(available), triton.NAME if torch.cuda.is_available() else None)
    return kernel if kernel in available else None


def encode(quantizer: Quantizer, x: Tensor, excluded: Tensor | None, path: str | None) -> Packed:
    """`Quantizer.encode` of blocks ``[N, n, C]``; ``excluded`` is bool ``[N, n]``.

    Raises:
        ValueError: ``x`` holds NaN in a token that sets a range.
    """
    if triton.seals(quantizer, x, path):
        return triton_encode(quantizer, x, excluded)
    if path is None or path not in native.PATHS:
        return quantizer.encode(x, excluded)
    if type(quantizer) is Ranked and _within_reach(x):
        return _encode_ranked(path, quantizer, x, excluded)
    if not _fits(quantizer, x):
        return quantizer.encode(x, excluded)
    if x.stride(-1) != 1:
        x = x.contiguous()
    codes_shape, ranges_shape = _shapes(quantizer, *x.shape[1:])
    codes = torch.empty(len(x), *codes_shape, dtype=torch.uint8)
    scale, zero = (torch.empty(len(x), *ranges_shape, dtype=torch.float16) for _ in range(2))
    packed: Packed = {"codes": codes, "scale": scale, "zero": zero}
    if excluded is not None:
        excluded = excluded.contiguous()
    _call("seal", path, quantizer, x, packed, excluded)
    return packed


def decode(quantizer: Quantizer, packed: Packed, out: Tensor, path: str | None) -> None:
    """`Quantizer.decode` into ``out`` ``[N, n, C]``, which may be some columns of a tensor."""
    if path is None or path not in native.PATHS or out.stride(-1) != 1:
        return quantizer.decode(packed, out)
    if type(quantizer) is Ranked and _within_reach(out):
        return _decode_ranked(path, quantizer, packed, out)
    if not _fits(quantizer, out):
        return quantizer.decode(packed, out)
    fields = {name: dense(packed, name) for name in ("codes", "scale", "zero")}
    _call("decode", path, quantizer, out, {n: t.contiguous() for n, t in fields.items()}, None)


def _fits(quantizer: Quantizer, rows: Tensor) -> TypeGuard[Affine]:
    return type(quantizer) is Affine and _within_reach(rows)


def _within_reach(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in _FLOATS and rows.numel() > 0


def _head(quantizer: Affine, tokens: int) -> int:
    """Channels of a head where a block's codes are in tiles, otherwise 0."""
    tile = quantizer.tile
    return tile.head if tile is not None and tile.fits(tokens) else 0


def _shapes(quantizer: Affine, tokens: int, channels: int) -> tuple[list[int], list[int]]:
    """Of the codes and of the ranges of one block."""
    head, bits = _head(quantizer, tokens), quantizer.bits
    if head:
        assert quantizer.tile is not None
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
    library, call = native.library(), native.Blocks()
    assert library is not None
    for name in ("codes", "scale", "zero"):
        setattr(call, name, dense(packed, name).data_ptr())
    call.rows, call.hidden = rows.data_ptr(), None if hidden is None else hidden.data_ptr()
    call.block_stride, call.token_stride, _ = rows.stride()
    call.blocks, call.tokens, call.channels = rows.shape
    call.dtype, call.bits = native.DTYPES[rows.dtype], quantizer.bits
    call.per_token = quantizer.per == "token"
    call.group = quantizer.range_size(call.channels if call.per_token else call.tokens)
    call.head = _head(quantizer, call.tokens)
    call.channel_lanes = quantizer.tile is not None and quantizer.tile.lanes == "channels"
    call.threads = torch.get_num_threads()
    call.zero_shift = quantizer.eta * (2**quantizer.bits - 1)
    call.scale_share = 1 - 2 * quantizer.eta
    failed = getattr(library, f"xq_{what}_{path}")(ctypes.byref(call))
    if failed == _FOUND_NAN:
        raise ValueError("NaN cannot be quantized")
    if failed:
        raise MemoryError(f"not enough memory to {what} blocks")


def _encode_ranked(path: str, quantizer: Ranked, x: Tensor, excluded: Tensor | None) -> Packed:
    # A few blocks at a time, so that what torch makes on the way stays in the CPU's cache.
    step = max(CACHED // x[0].numel(), 1)
    hidden = [None] * len(x) if excluded is None else excluded.split(step)
    parts = []
    for rows, apart in zip(x.split(step), hidden, strict=False):
        packed, even, _ = quantizer.measured(rows, apart)
        size = len(rows), quantizer.code_nbytes(x.shape[1])
        packed["codes"] = torch.empty(size, dtype=torch.uint8)
        _call_ranked("rank", path, quantizer, even.contiguous(), packed, edge_table())
        parts.append(packed)
    return {name: torch.cat([dense(part, name) for part in parts]) for name in parts[0]}


def _decode_ranked(path: str, quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    whole: Packed = {name: dense(packed, name).contiguous() for name in packed}
    _call_ranked("ranked", path, quantizer, out, whole, level_table())


def _call_ranked(
    what: str, path: str, quantizer: Ranked, rows: Tensor, packed: Packed, table: Tensor
) -> None:
    library, call = native.library(), native.Ranked()
    assert library is not None
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
    if getattr(library, f"xq_{what}_{path}")(ctypes.byref(call)):
        raise MemoryError("not enough memory to pack or unpack blocks")

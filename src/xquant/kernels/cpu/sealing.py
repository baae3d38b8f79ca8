"""Quantizers by the native library, where it can: on the CPU, packed and unpacked in one go.

The result is that of the quantizer in torch, bit for bit, but for the sign of a zero, which torch leaves to
the order in which it looks for the lowest.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...quant import Affine, Packed, Quantizer
from ...quant.pack import packed_rows
from ...quant.quantizer import dense
from ...quant.ranked import Ranked
from ..triton import support as triton
from ..triton import triton_encode
from . import library as native
from . import ranked_sealing

_Encode = Callable[[str, Any, Tensor, Tensor | None], Packed]
_Decode = Callable[[str, Any, Packed, Tensor], None]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def instruction_set(kernel: str) -> str | None:
    """What a cache of this ``kernel`` seals with; None for torch."""
    if kernel == triton.NAME:
        return kernel
    available = () if native.library() is None else native.paths()
    if kernel == "auto":
        return next(iter(available), None)
    return kernel if kernel in available else None


def by_launch(quantizer: Quantizer, x: Tensor, path: str | None) -> bool:
    """Whether `encode` of ``x`` is a launch on a GPU, which takes blocks of several layers as well."""
    return triton.seals(quantizer, x, path)


def encode(quantizer: Quantizer, x: Tensor, excluded: Tensor | None, path: str | None) -> Packed:
    """`Quantizer.encode` of blocks ``[N, n, C]``; ``excluded`` is bool ``[N, n]``.

    Raises:
        ValueError: ``x`` holds NaN in a token that sets a range.
    """
    if triton.seals(quantizer, x, path):
        return triton_encode(quantizer, x, excluded)
    own = _OWN.get(type(quantizer)) if path in native.PATHS and _within_reach(x) else None
    if own is None:
        return quantizer.encode(x, excluded)
    assert path is not None
    rows = x if x.stride(-1) == 1 else x.contiguous()
    return own[0](path, quantizer, rows, None if excluded is None else excluded.contiguous())


def decode(quantizer: Quantizer, packed: Packed, out: Tensor, path: str | None) -> None:
    """`Quantizer.decode` into ``out`` ``[N, n, C]``, which may be some columns of a tensor."""
    own = _OWN.get(type(quantizer)) if path in native.PATHS and _within_reach(out) else None
    if own is None or out.stride(-1) != 1:
        return quantizer.decode(packed, out)
    assert path is not None
    own[1](path, quantizer, {n: dense(packed, n).contiguous() for n in packed}, out)


def _within_reach(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in _FLOATS and rows.numel() > 0


def _encode_affine(path: str, quantizer: Affine, x: Tensor, excluded: Tensor | None) -> Packed:
    codes_shape, ranges_shape = _shapes(quantizer, *x.shape[1:])
    codes = torch.empty(len(x), *codes_shape, dtype=torch.uint8)
    scale, zero = (torch.empty(len(x), *ranges_shape, dtype=torch.float16) for _ in range(2))
    packed: Packed = {"codes": codes, "scale": scale, "zero": zero}
    _call("affine_encode", path, quantizer, x, packed, excluded)
    return packed


def _decode_affine(path: str, quantizer: Affine, packed: Packed, out: Tensor) -> None:
    _call("affine_decode", path, quantizer, out, packed, None)


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
    call = native.AffineBlocks()
    blocks, tokens, channels = rows.shape
    codes, ranges = _shapes(quantizer, tokens, channels)
    call.codes = native.address(dense(packed, "codes"), torch.uint8, blocks, *codes)
    for name in ("scale", "zero"):
        setattr(call, name, native.address(dense(packed, name), torch.float16, blocks, *ranges))
    call.rows = rows.data_ptr()
    if hidden is not None:
        call.excluded = native.address(hidden, torch.bool, blocks, tokens)
    call.block_stride, call.token_stride, _ = rows.stride()
    call.blocks, call.tokens, call.channels = blocks, tokens, channels
    call.dtype, call.bits = native.DTYPES[rows.dtype], quantizer.bits
    call.per_token = quantizer.per == "token"
    call.group = quantizer.range_size(call.channels if call.per_token else call.tokens)
    call.head = _head(quantizer, call.tokens)
    call.channel_lanes = quantizer.tile is not None and quantizer.tile.lanes == "channels"
    call.threads = torch.get_num_threads()
    call.zero_shift = quantizer.eta * (2**quantizer.bits - 1)
    call.scale_factor = 1 - 2 * quantizer.eta
    native.pack_or_unpack(f"{what}_{path}", call)


_OWN: dict[type, tuple[_Encode, _Decode]] = {
    Affine: (_encode_affine, _decode_affine),
    Ranked: (ranked_sealing.encode, ranked_sealing.decode),
}
"""The native ways of a quantizer, of this class and no other: one derived from it may do something else."""

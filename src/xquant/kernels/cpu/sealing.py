"""Blocks packed and unpacked by the native library, in one go: csrc/sealing.h, codebook_sealing.h and
ranked_sealing.h.

It equals `Affine`, `Codebook`, `Ranked` and `Classed` in torch, bit for bit but for the sign of a zero, which
torch leaves to the order in which it looks for the lowest.
"""

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...past.packer import Packer
from ...quant import Affine, Codebook, Packed, Quantizer, Ragged
from ...quant.classes import Classed
from ...quant.codebook import outlier_count
from ...quant.grouped import Grouped
from ...quant.levels import edges_of
from ...quant.outliers import RAGGED
from ...quant.quantizer import dense
from ...quant.ranked import (
    Ranked,
    cost_border_table,
    filled,
    gain_cost_table,
    level_table,
    search_tables,
    whole,
)
from ...quant.steps import border_table, size_table
from ..call import FLOATS
from . import library as native


class NativePacker(Packer):
    """Packs with the library's functions for the instruction set ``isa``; what they do not know, with
    torch."""

    def __init__(self, isa: str) -> None:
        self._isa = isa

    def pack(self, quantizer: Quantizer, x: Tensor, excluded: Tensor | None) -> Packed:
        own = _PACKED.get(type(quantizer)) if _within_reach(x) else None
        if own is None:
            return super().pack(quantizer, x, excluded)
        rows = x if x.stride(-1) == 1 else x.contiguous()
        hidden = None if excluded is None else excluded.contiguous()
        found: Packed = own(self._isa, quantizer, rows, hidden)
        return found

    def unpack(self, quantizer: Quantizer, packed: Packed, out: Tensor) -> None:
        own = _UNPACKED.get(type(quantizer)) if _within_reach(out) else None
        if own is None or out.stride(-1) != 1 or 0 in out.stride():
            return super().unpack(quantizer, packed, out)
        fields = {name: dense(packed, name).contiguous() for name in packed}
        own(self._isa, quantizer, fields, out)


def _within_reach(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in FLOATS and rows.numel() > 0


def pack_affine(isa: str, quantizer: Affine, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN in a token that sets a range.
    """
    packed = _empty(quantizer, x)
    _call("affine_encode", isa, quantizer, x, packed, excluded)
    return packed


def unpack_affine(isa: str, quantizer: Affine, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``, from contiguous fields."""
    _call("affine_decode", isa, quantizer, out, packed, None)


def _empty(quantizer: Quantizer, x: Tensor) -> Packed:
    """Memory for what is packed of blocks ``[N, n, C]``."""
    fields = quantizer.fields(*x.shape[1:])
    return {name: field.empty(len(x)) for name, field in fields.items()}


def _point(call: ctypes.Structure, quantizer: Quantizer, rows: Tensor, packed: Packed) -> None:
    """Point ``call`` to what is packed of blocks ``rows`` ``[N, n, C]``, and to the rows."""
    blocks, tokens, channels = rows.shape
    for name, field in quantizer.fields(tokens, channels).items():
        if field.part != "outliers":
            setattr(call, name, native.address(dense(packed, name), field.dtype, blocks, *field.shape))
    call.rows = native.address(rows, FLOATS, *rows.shape, rows=True)
    call.block_stride, call.token_stride, _ = rows.stride()
    call.blocks, call.tokens, call.channels = blocks, tokens, channels
    call.dtype, call.threads = native.DTYPES[rows.dtype], torch.get_num_threads()


def _call(
    what: str, isa: str, quantizer: Affine, rows: Tensor, packed: Packed, hidden: Tensor | None
) -> None:
    call = native.AffineBlocks()
    _describe(call, quantizer, rows, packed, hidden)
    call.zero_shift = quantizer.eta * (2**quantizer.bits - 1)
    call.scale_factor = 1 - 2 * quantizer.eta
    native.function(what, isa)(call)


def _describe(
    call: native.AffineBlocks, quantizer: Grouped, rows: Tensor, packed: Packed, hidden: Tensor | None
) -> None:
    _point(call, quantizer, rows, packed)
    if hidden is not None:
        call.excluded = native.address(hidden, torch.bool, *rows.shape[:2])
    operand = quantizer.operand(*rows.shape[1:])
    call.bits, call.per_token, call.group = operand.bits, operand.per_token, operand.group
    tile = operand.tile
    if tile is not None:
        call.head = tile.head if tile.fits(rows.shape[1]) else 0
        call.channel_lanes = tile.lanes == "channels"


def pack_codebook(isa: str, quantizer: Codebook, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN, or tensors that do not fit each other.
    """
    (blocks, tokens, channels), call = x.shape, native.CodebookBlocks()
    packed = _empty(quantizer, x)
    _describe(call.blocks, quantizer, x, packed, excluded)
    levels = quantizer.levels.to("cpu").float()
    edges = edges_of(levels)
    call.levels, call.edges = levels.data_ptr(), edges.data_ptr()
    offline = quantizer.operand(tokens, channels).offline
    if offline is not None:
        call.blocks.per_token, call.blocks.group = 0, tokens
        call.offline_scale, call.offline_zero = (native.address(t, torch.float16, channels) for t in offline)
    bounds = [t.to("cpu").float().expand(channels).contiguous() for t in quantizer.threshold or ()]
    if bounds:
        call.lowest, call.highest = (t.data_ptr() for t in bounds)
    elif quantizer.share and offline is None:
        length, group = channels if call.blocks.per_token else tokens, call.blocks.group
        call.outliers = outlier_count(quantizer.share, group)
        call.last_outliers = outlier_count(quantizer.share, (length - 1) % group + 1)
    if not quantizer.sparse:
        native.function("codebook_encode", isa)(call)
        return packed
    counts = dense(packed, "outlier_count")
    room = {n: torch.empty(blocks, tokens * channels, dtype=kind, device="cpu") for n, kind in RAGGED.items()}
    call.outlier_count, call.count_bytes = counts.data_ptr(), counts.itemsize
    call.outlier_excess, call.outlier_channel = (room[name].data_ptr() for name in RAGGED)
    native.function("codebook_encode", isa)(call)
    found = (counts.long() & 0xFFFF).sum(-1).tolist()
    for name, held in room.items():
        packed[name] = Ragged(row[:count].clone() for row, count in zip(held, found, strict=True))
    return packed


def pack_ranked(isa: str, quantizer: Ranked, x: Tensor, excluded: Tensor | None) -> Packed:
    """Blocks ``[N, n, C]``, contiguous in ``C``; ``excluded`` bool ``[N, n]``, contiguous.

    Raises:
        ValueError: NaN, or tensors that do not fit each other.
    """
    x, excluded = filled(x, excluded)
    packed, rows = _empty(quantizer, x), x.float()
    call = _ranked_call(quantizer, rows, packed)
    edges, whole, units, ends = search_tables()
    call.edges, call.whole_levels = edges.data_ptr(), whole.data_ptr()
    call.units, call.ends = units.data_ptr(), ends.data_ptr()
    borders, _ = border_table()
    call.borders, call.gain_costs = borders.data_ptr(), gain_cost_table().data_ptr()
    call.cost_borders = cost_border_table().data_ptr()
    call.rests, call.levels = quantizer.rests, level_table().data_ptr()
    if excluded is not None:
        call.excluded = native.address(excluded, torch.bool, *x.shape[:2])
    if quantizer.costs is not None:
        call.costs = native.address(quantizer.costs, torch.float32, quantizer.measured)
    native.function("ranked_encode", isa)(call)
    return packed


def unpack_ranked(isa: str, quantizer: Ranked, packed: Packed, out: Tensor) -> None:
    """Into ``out`` ``[N, n, C]``, contiguous in ``C``, from contiguous fields.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    blocks, tokens, channels = out.shape
    rows = out if tokens == whole(tokens) else out.new_empty(blocks, whole(tokens), channels)
    call = _ranked_call(quantizer, rows, packed)
    call.levels = level_table().data_ptr()
    native.function("ranked_decode", isa)(call)
    if rows is not out:
        out.copy_(rows[:, :tokens])


def _ranked_call(quantizer: Ranked, rows: Tensor, packed: Packed) -> native.RankedBlocks:
    call = native.RankedBlocks()
    _point(call, quantizer, rows, packed)
    sizes, zero = size_table()
    call.usual = native.address(quantizer.usual, torch.int16, rows.shape[2])
    call.sizes = sizes[zero:].data_ptr()
    call.code_bytes = quantizer.code_nbytes(rows.shape[1])
    call.counts[:] = quantizer.counts
    return call


def pack_classed(isa: str, quantizer: Classed, x: Tensor, excluded: Tensor | None) -> Packed:
    """Each class by `pack_ranked`."""
    return quantizer.encode_with(partial(pack_ranked, isa), x, excluded)


def unpack_classed(isa: str, quantizer: Classed, packed: Packed, out: Tensor) -> None:
    """Each class by `unpack_ranked`."""
    quantizer.decode_with(partial(unpack_ranked, isa), packed, out)


_PACKED: dict[type, Any] = {
    Affine: pack_affine,
    Codebook: pack_codebook,
    Ranked: pack_ranked,
    Classed: pack_classed,
}
_UNPACKED: dict[type, Any] = {Affine: unpack_affine, Ranked: unpack_ranked, Classed: unpack_classed}
"""The quantizers whose arithmetic the library has, of these classes and no other: one that is derived from
them may do something else."""

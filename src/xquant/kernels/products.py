"""Scores with keys that are rebuilt from packed states by the native library."""

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..methods.xquant import Rematerialized
from ..quant import Affine, Segment
from ..quant.pack import Tile
from . import native

if TYPE_CHECKING:
    from ..layer import CompressedLayer
    from ..stream import Stream

ROWS = 8
"""As BUILT_ROWS in cpu/rebuild.h."""
PAIRED = [0, 2, 1, 3]
"""The order of the channels of a quad in registers (cpu/tiles.h)."""


def unfit(codec: Rematerialized, block: int) -> str:
    """Why the library cannot rebuild the keys of a layer; empty where it can."""
    segment, view = codec.segments[0], codec.view
    quantizer = segment.quantizer
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    if codec.reads_below or codec.feeds_above:
        return "keys are rebuilt from sums over layers"
    if not isinstance(quantizer, Affine) or segment.channels != codec.key_weight.shape[1]:
        return "not all that keys come from is quantized alike"
    if view.key_norm is not None:
        return "keys are normalized after they are rebuilt"
    if quantizer.tile is None or not quantizer.tile.fits(block) or view.head_size % ROWS:
        return f"states of {segment.channels} channels in blocks of {block}"
    if quantizer.per == "channel" and quantizer.range_size(block) < block:
        return "several ranges of a channel in a block"
    if quantizer.tile.head * (2**quantizer.bits - 1) * 32767 >= 2**31 and quantizer.per == "token":
        return f"{quantizer.bits}-bit ranges of {quantizer.tile.head} channels"
    return ""


def arranged(weights: Tensor, group: int) -> Tensor:
    """int16 weights ``[N, C]`` in the order in which they meet the codes of tiles of ``group`` channels:
    ``[N/8, C/group, units, 8, 8, 4]``, ``units = group / 32``; the last but one are the 8 of ``N``."""
    split = weights.view(-1, ROWS, weights.shape[1] // group, 8, group // 32, 4)
    return split.permute(0, 2, 4, 3, 1, 5)[..., PAIRED].contiguous()


class Blocks:
    """Keeps a side of the C interface pointed to the blocks of one segment."""

    def __init__(self, stream: "Stream", number: int, side: native.Side) -> None:
        self._stream, self._number, self._side = stream, number, side
        self._version = -1

    def refresh(self) -> None:
        if self._stream.version == self._version:
            return
        self._version = self._stream.version
        self._kept = []
        for name, blocks in self._stream.pool[self._number].items():
            self._kept.append(blocks.addresses)
            setattr(self._side, name, self._kept[-1].data_ptr())


class KeyProduct:
    """The native side of one layer's key projection."""

    def __init__(self, layer: "CompressedLayer", path: str) -> None:
        library = native.library()
        assert library is not None and isinstance(layer.codec, Rematerialized)
        self._layer = layer
        self._function = getattr(library, f"xq_rebuild_{path}")
        self._call = call = native.Rebuild()
        self._blocks = Blocks(layer.stream, 0, call.key)
        codec, view = layer.codec, layer.codec.view
        quantizer: Any = codec.segments[0].quantizer
        call.key.bits, call.key.per_token = quantizer.bits, quantizer.per == "token"
        group = call.key.group = quantizer.tile.head
        call.block, call.channels = layer.stream.block, codec.segments[0].channels
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        call.turned = view.rotary_size // 2
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = self._prepare(
                codec.key_weight.float(), group, quantizer.per == "channel"
            )
        weights, unit, column, totals = codec.prepared["keys"]
        bias = view.key_bias
        bias = torch.zeros(0) if bias is None else bias.float().contiguous()
        self._constant = [weights, unit, column, totals, bias]
        call.weights, call.unit, call.column, call.totals = (
            t.data_ptr() for t in self._constant[:4]
        )
        call.bias = bias.data_ptr() if len(bias) else None

    @staticmethod
    def _prepare(weight: Tensor, group: int, by_channel: bool) -> list[Tensor]:
        """int16 weights, the unit of each row ``[N]``, what columns were divided by ``[C]``, and sums by
        range ``[N, C/group]`` of ``weight`` ``[N, C]``."""
        totals = weight.unflatten(1, (-1, group)).sum(-1)
        column = torch.ones(weight.shape[1])
        if by_channel:
            # Columns of the same size use the 15 bits alike; their scales take the difference.
            column = weight.norm(dim=0).clamp(min=torch.finfo(weight.dtype).tiny)
            weight = weight / column
        unit = weight.abs().amax(1).clamp(min=1e-30) / 32767
        return [arranged((weight / unit[:, None]).round().short(), group), unit, column, totals]

    def scores(self, query: Tensor, table: Tensor, columns: Tensor) -> Tensor:
        """Scores ``[B, G, r, c * n]`` of queries ``[B, G, r, D]`` (fp32) with the keys of the blocks
        ``table`` ``[B, c]``, whose tokens are in ``columns`` ``[c * n]``."""
        self._blocks.refresh()
        cos, sin = (at_columns(t, columns, 2) for t in self._layer.index.rope_by_channel())
        call = self._call
        query = query.contiguous()
        batch, heads, rows, _ = query.shape
        call.batch, call.columns = table.shape
        scores = torch.empty(batch, heads, rows, call.columns * call.block)
        call.table, call.table_stride = table.data_ptr(), table.stride(0)
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.angle_batch, call.angle_channel, _ = cos.stride()
        call.query, call.scores, call.rows = query.data_ptr(), scores.data_ptr(), rows
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to rebuild keys")
        return scores


class ValueSum:
    """Sums of what one layer's values come from."""

    def __init__(self, layer: "CompressedLayer", path: str) -> None:
        library = native.library()
        assert library is not None
        self._function = getattr(library, f"xq_sum_{path}")
        self._call = call = native.Sum()
        segment = layer.codec.segments[-1]
        quantizer: Any = segment.quantizer
        self._blocks = Blocks(layer.stream, -1, call.value)
        call.value.bits, call.value.per_token = quantizer.bits, True
        call.value.group = quantizer.range_size(segment.channels)
        call.block, call.channels = layer.stream.block, segment.channels

    @staticmethod
    def fits(segment: Segment, block: int) -> bool:
        """Whether the library can sum the channels of a segment."""
        quantizer = segment.quantizer
        return (
            isinstance(quantizer, Affine)
            and quantizer.per == "token"
            and quantizer.tile == Tile(segment.channels, "channels")
            and quantizer.tile.fits(block)
            and quantizer.range_size(segment.channels) % 16 == 0
        )

    def of(self, weights: Tensor, table: Tensor) -> Tensor:
        """Sums ``[B, r, C]`` of the rows of the blocks ``table`` ``[B, c]`` by ``weights`` ``[B, r, c * n]``
        (fp32, none below 0)."""
        self._blocks.refresh()
        call, weights = self._call, weights.contiguous()
        out = torch.empty(*weights.shape[:2], call.channels)
        call.batch, call.columns = table.shape
        call.table, call.table_stride = table.data_ptr(), table.stride(0)
        call.weights, call.out, call.rows = weights.data_ptr(), out.data_ptr(), weights.shape[1]
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to sum values")
        return out


def at_columns(rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """What stands in these columns along ``dim``, a view where they follow each other."""
    first, count = int(columns[0]), len(columns)
    if bool((columns.diff() == 1).all()):
        return rows.narrow(dim, first, count)
    return rows.index_select(dim, columns)

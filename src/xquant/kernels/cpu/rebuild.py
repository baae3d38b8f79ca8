"""Scores with keys that are rebuilt from packed states by the native library."""

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...methods.xquant import Rematerialized
from ...quant import Affine, Segment
from ...quant.pack import Tile
from . import library as native

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer
    from ...store.stream import Stream

ROWS = 8
"""As BUILT_ROWS in csrc/rebuild.h."""
PAIRED = [0, 2, 1, 3]
"""The order of the channels of a quad in registers (csrc/tiles.h)."""


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

    def __init__(self, stream: "Stream", number: int, side: native.Operand) -> None:
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


class KeyScores:
    """Scores with the keys of one layer, which a function of the library builds of packed blocks."""

    def __init__(self, layer: "CompressedLayer", function: str, call: Any) -> None:
        library = native.library()
        assert library is not None
        self._layer, self._call = layer, call
        self._function = getattr(library, function)
        self._blocks = Blocks(layer.stream, 0, call.key)

    def _scores(self, query: Tensor, table: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Scores fp32 ``[B, G, r, c * n]`` of contiguous queries ``[B, G, r, .]`` (fp32) with the blocks
        ``table`` ``[B, c]``; cos and sin, fp32, of the same strides, of each sequence first.

        Raises:
            MemoryError: the library has none.
        """
        self._blocks.refresh()
        call = self._call
        batch, heads, rows, _ = query.shape
        call.batch, call.columns = table.shape
        scores = torch.empty(batch, heads, rows, call.columns * self._layer.stream.block)
        call.table, call.table_stride = table.data_ptr(), table.stride(0)
        call.cos, call.sin, call.rope_batch = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        call.query, call.scores, call.rows = query.data_ptr(), scores.data_ptr(), rows
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to rebuild keys")
        return scores


class KeyProduct(KeyScores):
    """The native side of one layer's key projection."""

    def __init__(self, layer: "CompressedLayer", path: str) -> None:
        call = native.RebuildScores()
        super().__init__(layer, f"xq_rebuild_scores_{path}", call)
        codec, view = layer.codec, layer.codec.view
        assert isinstance(codec, Rematerialized)
        quantizer: Any = codec.segments[0].quantizer
        call.key.bits, call.key.per_token = quantizer.bits, quantizer.per == "token"
        group = call.key.group = quantizer.tile.head
        call.block, call.channels = layer.stream.block, codec.segments[0].channels
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        call.rotary_pairs = view.rotary_size // 2
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = self._prepare(
                codec.key_weight.float(), group, quantizer.per == "channel"
            )
        weights, unit, column, totals = codec.prepared["keys"]
        bias = view.key_bias
        bias = torch.zeros(0) if bias is None else bias.float().contiguous()
        self._constant = [weights, unit, column, totals, bias]
        call.weights, call.weight_scale, call.channel_scale, call.weight_sums = (
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
        cos, sin = (at_columns(t, columns, 2) for t in self._layer.index.rope_by_channel())
        self._call.rope_channel = cos.stride(1)
        return self._scores(query.contiguous(), table, cos, sin)


class PackedSum:
    """Sums of what one layer's values come from, by a function of the library."""

    def __init__(self, layer: "CompressedLayer", function: str, call: Any) -> None:
        library = native.library()
        assert library is not None
        self._call = call
        self._function = getattr(library, function)
        self._blocks = Blocks(layer.stream, -1, call.value)
        self._channels = layer.codec.segments[-1].channels

    def of(self, weights: Tensor, table: Tensor) -> Tensor:
        """Sums fp32 ``[B, r, C]`` of the rows of the blocks ``table`` ``[B, c]`` by ``weights``
        ``[B, r, c * n]`` (fp32).

        Raises:
            MemoryError: the library has none.
        """
        self._blocks.refresh()
        call, weights = self._call, weights.contiguous()
        out = torch.empty(*weights.shape[:2], self._channels)
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


class ValueSum(PackedSum):
    """The same of affine codes per token; no weight may be below 0."""

    def __init__(self, layer: "CompressedLayer", path: str) -> None:
        call = native.RebuildSum()
        super().__init__(layer, f"xq_rebuild_sum_{path}", call)
        segment = layer.codec.segments[-1]
        quantizer: Any = segment.quantizer
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

"""Attention over keys that are rebuilt from packed rows, by the native library: csrc/rebuild.h.

A score is ``Q · R(p) (W_k x_p + b_k)``; the library multiplies the codes of ``x_p`` with int16 weights, so
keys are never stored, and those of slow pairs never built (`turning`). It equals attention over
`CompressedLayer.read` but for the rounding of the weights to 15 bits and what waves miss.
"""

import ctypes

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.rematerialized import Rematerialized
from ...quant.operand import Operand
from ...quant.pack import Tile, channel_order
from ..slow import SlowPairs, widened
from . import library as native
from .turning import ROWS, SLOW_LIMIT, Angles, in_pairs, point_to_angles

PAIRED = [0, 2, 1, 3]
"""The order of the channels of a quad in registers (csrc/tiles.h)."""
MADE = 32
"""What the channels of slow pairs are filled up to a multiple of, as made_channels in csrc/rebuild.h."""


def unfit(codec: LayerCodec, block: int) -> str:
    """Why the library cannot rebuild the keys of a layer; empty where it can."""
    segment, view = codec.segments[0], codec.view
    rebuilt = codec.rematerialized
    assert rebuilt is not None
    operand = segment.operand(block)
    if view.device.type != "cpu":
        return f"the layer is on {view.device.type}"
    if codec.sums_deltas:
        return "keys are rebuilt from sums over layers"
    affine = isinstance(operand, Operand) and operand.levels is None
    if not affine or segment.channels != rebuilt.key_weight.shape[1]:
        return "not all that keys come from is quantized alike"
    assert isinstance(operand, Operand)
    if view.key_norm is not None:
        return "keys are normalized after they are rebuilt"
    if operand.tile is None or not operand.tile.fits(block) or view.head_size % ROWS:
        return f"states of {segment.channels} channels in blocks of {block}"
    if not operand.per_token and operand.group < block:
        return "several ranges of a channel in a block"
    if operand.tile.head * (2**operand.bits - 1) * 32767 >= 2**31 and operand.per_token:
        return f"{operand.bits}-bit ranges of {operand.tile.head} channels"
    return ""


class KeyProduct:
    """Scores with the keys of one layer, which the library builds of packed blocks.

    Whoever has the blocks points ``call.key`` to them.
    """

    def __init__(self, codec: Rematerialized, block: int, isa: str) -> None:
        library = native.library()
        assert library is not None
        self.call = call = native.RebuildScores()
        view, self._block = codec.view, block
        self._function = getattr(library, f"xq_rebuild_scores_{isa}")
        operand = codec.segments[0].operand(block)
        assert isinstance(operand, Operand) and operand.tile is not None
        call.key.bits, call.key.per_token = operand.bits, operand.per_token
        self._group = call.key.group = operand.tile.head
        call.block, call.channels = block, operand.channels
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        self._codec = codec
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = self._prepare()
        weights, unit, column, totals = codec.prepared["keys"]
        self._constant = [weights, unit, column, totals]
        call.weights, call.weight_scale, call.channel_scale, call.weight_sums = (
            t.data_ptr() for t in self._constant
        )
        if codec.key_bias is not None:
            self._constant.append(self._ordered(codec.key_bias))
            call.bias = self._constant[-1].data_ptr()

    def _ordered(self, rows: Tensor) -> Tensor:
        """Rows ``[G * D, ...]`` of heads in fp32, in the order of their pairs."""
        return in_pairs(self._codec.view, rows).flatten(0, 1).contiguous()

    def _prepare(self) -> list[Tensor]:
        """int16 weights, the unit of each row ``[N]``, what columns were divided by ``[C]``, and sums by
        range ``[N, C/group]`` of the weight of keys ``[N, C]``."""
        weight = self._ordered(self._codec.key_weight)
        totals = weight.unflatten(1, (-1, self._group)).sum(-1)
        column = weight.new_ones(weight.shape[1])
        if not self.call.key.per_token:
            # Columns of the same size use the 15 bits alike; their scales take the difference.
            column = weight.norm(dim=0).clamp(min=torch.finfo(weight.dtype).tiny)
            weight = weight / column
        unit = weight.abs().amax(1).clamp(min=1e-30) / 32767
        whole = (weight / unit[:, None]).round().short()
        return [in_tile_order(whole, self._group), unit, column, totals]

    def _prepare_slow(self, built: int) -> list[Tensor]:
        """Of the channels of a head from ``built`` on: int16 weights ``[G, pairs, C, 2]``, with zeros up to a
        multiple of `MADE`, their units and the bias of keys ``[G, 2, width]``."""

        def by_pair(rows: Tensor) -> Tensor:
            heads = in_pairs(self._codec.view, rows)
            return heads[:, built:].unflatten(1, (-1, 2))  # [G, pairs, 2, ...]

        weight = by_pair(self._codec.key_weight) / self._codec.prepared["keys"][2]
        unit = weight.abs().amax(3).clamp(min=1e-30) / SLOW_LIMIT
        whole = (weight / unit[..., None]).round().short()
        whole = torch.nn.functional.pad(whole, (0, -whole.shape[-1] % MADE)).mT.contiguous()
        bias = self._codec.key_bias
        bias = unit * 0 if bias is None else by_pair(bias)
        return [whole, *(widened(t.mT) for t in (unit, bias))]

    def scores(
        self, query: Tensor, table: Tensor, angles: Angles, limits: Tensor | None = None
    ) -> Tensor:
        """Scores ``[B, G, r, c * n]`` of queries ``[B, G, r, D]`` (fp32) with the keys of the blocks
        ``table`` ``[B, c]``. With ``limits`` int32 ``[B]``, those of the blocks after so many tokens are not
        written.

        Raises:
            MemoryError: the library has none.
        """
        call, query = self.call, query.contiguous()
        batch, heads, rows, _ = query.shape
        slow = point_to_angles(call.turning, self._codec.view, angles, rows)
        if slow is not None:
            self._set_slow(slow)
        call.batch, call.columns = table.shape
        scores = query.new_empty(batch, heads, rows, call.columns * self._block)
        table = table.int()
        call.table, call.table_stride = (
            native.address(table, torch.int32, batch, call.columns, rows=True),
            table.stride(0),
        )
        call.limits = None if limits is None else native.address(limits, torch.int32, batch)
        sizes = batch, call.kv_heads, rows, call.head_size
        call.query = native.address(query, torch.float32, *sizes)
        call.scores, call.rows = scores.data_ptr(), rows
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to rebuild keys")
        return scores

    def _set_slow(self, slow: SlowPairs) -> None:
        call, name = self.call, f"slow from {slow.built}"
        if name not in self._codec.prepared:
            self._codec.prepared[name] = self._prepare_slow(slow.built)
        call.slow_weights, call.slow_scale, call.slow_bias = (
            t.data_ptr() for t in self._codec.prepared[name]
        )


class ValueSum:
    """Sums of what one layer's values come from, affine codes with ranges per token.

    Whoever has the blocks points ``call.value`` to them.
    """

    def __init__(self, codec: LayerCodec, block: int, isa: str) -> None:
        library, operand = native.library(), codec.segments[-1].operand(block)
        assert library is not None and isinstance(operand, Operand)
        self.call = call = native.RebuildSum()
        self._function = getattr(library, f"xq_rebuild_sum_{isa}")
        call.value.bits, call.value.per_token, call.value.group = operand.bits, True, operand.group
        call.block, call.channels = block, operand.channels

    def of(self, weights: Tensor, table: Tensor, limits: Tensor | None = None) -> Tensor:
        """Sums fp32 ``[B, r, C]`` of the rows of the blocks ``table`` ``[B, c]`` by ``weights``
        ``[B, r, c * n]`` (fp32, none below 0); with ``limits`` int32 ``[B]``, of the blocks with so many
        tokens.

        Raises:
            MemoryError: the library has none.
        """
        call, weights = self.call, weights.contiguous()
        batch, rows, _ = weights.shape
        out = weights.new_empty(batch, rows, call.channels)
        call.batch, call.columns = table.shape
        table = table.int()
        call.table, call.table_stride = (
            native.address(table, torch.int32, batch, call.columns, rows=True),
            table.stride(0),
        )
        call.limits = None if limits is None else native.address(limits, torch.int32, batch)
        sizes = batch, rows, call.columns * call.block
        call.weights = native.address(weights, torch.float32, *sizes)
        call.out, call.rows = out.data_ptr(), rows
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to sum values")
        return out

    @staticmethod
    def fits(codec: LayerCodec, block: int) -> bool:
        """Whether the library can sum what the values of a layer come from."""
        segment = codec.segments[-1]
        operand = segment.operand(block)
        return (
            isinstance(operand, Operand)
            and operand.levels is None
            and operand.per_token
            and operand.tile == Tile(segment.channels, "channels")
            and operand.tile.fits(block)
        )


def in_tile_order(weights: Tensor, group: int) -> Tensor:
    """int16 weights ``[N, C]`` in the order in which they meet the codes of tiles of ``group`` channels:
    ``[N/8, C/group, group/4, 8, 4]``; the last but one are the 8 of ``N``."""
    quads = torch.tensor(channel_order(group), device=weights.device).view(-1, 4)
    in_units = group // 32 * 8
    # Of the quads of units, those that come out of a row of bytes follow each other.
    units = quads[:in_units].view(8, -1, 4).transpose(0, 1).flatten(0, 1)
    order = torch.cat([units, quads[in_units:]])[:, PAIRED].flatten()
    split = weights.view(-1, ROWS, weights.shape[1] // group, group)[..., order]
    return split.unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4).contiguous()

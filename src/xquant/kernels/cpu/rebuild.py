"""Attention over keys and values that are rebuilt from affine codes, by the native library.

A score is ``Q · R(p) (W_k x_p + b_k)``; the library (csrc/rebuild.h) multiplies the codes of ``x_p`` with
int16 weights, so keys are never stored, and those of slow pairs never built (`turning`). Then it takes the
softmax, together with the tokens that are kept as they are (csrc/weigh.h), and sums what packed values come
from. Torch multiplies the sums with the weight of values.

It equals attention over `CompressedLayer.read` but for two errors: weights are rounded to 15 bits, and the
rotations of slow pairs are sums of a few waves (`slow`).
"""

from functools import cached_property

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...methods.codec import Rematerialized
from ...past.sequences import Sequences
from ...past.stream import Stream
from ...quant.operand import Operand
from ...quant.pack import Tile, channel_order
from ..call import AttentionCall
from ..rebuilding import TOKENS
from ..slow import SlowPairs, widened
from . import library as native
from .turning import ROWS, SLOW_LIMIT, RebuildingKernel, in_pairs

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
    if operand is None:
        return "what keys and values come from is in no format that a kernel reads"
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


class RebuiltKernel(RebuildingKernel):
    """Attends over affine codes of what keys and values come from.

    Args:
        stream: of a cache that grows, whose values torch may sum where the library cannot.
    """

    def __init__(self, codec: Rematerialized, block: int, isa: str, stream: Stream | None = None) -> None:
        self._call, self._softmax, view = native.RebuildScores(), native.Weigh(), codec.view
        self._sums = ValueSum(codec, block, isa) if ValueSum.fits(codec, block) else None
        sources = {0: self._call.key} | ({} if self._sums is None else {-1: self._sums.call.value})
        super().__init__(self._softmax.attend, sources, view, block, self._call.turning)
        self._codec, self._block, self._stream = codec, block, stream
        self._score = native.function("rebuild_scores", isa)
        self._take_softmax = native.function("weigh", isa)
        self.to.dtype, self.to.scaling = native.DTYPES[torch.float32], 1
        self._describe_keys()
        self._value_weight = codec.value_weight.unflatten(0, (view.kv_heads, -1)).mT  # [G, C, D]
        if codec.value_bias is not None:
            self._bias = codec.value_bias.float().contiguous()
            self._softmax.value_bias = native.address(self._bias, torch.float32, view.kv_width)

    def _describe_keys(self) -> None:
        call, codec, view = self._call, self._codec, self._codec.view
        operand = codec.segments[0].operand(self._block)
        assert isinstance(operand, Operand) and operand.tile is not None
        call.key.bits, call.key.per_token = operand.bits, operand.per_token
        self._group = call.key.group = operand.tile.head
        call.block, call.channels = self._block, operand.channels
        call.kv_heads, call.head_size = view.kv_heads, view.head_size
        if "keys" not in codec.prepared:
            codec.prepared["keys"] = self._prepare()
        self._constant = list(codec.prepared["keys"])
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
        if not self._call.key.per_token:
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

    def _use_weights(self, slow: SlowPairs | None) -> None:
        if slow is None:
            return
        call, name = self._call, f"slow from {slow.built}"
        if name not in self._codec.prepared:
            self._codec.prepared[name] = self._prepare_slow(slow.built)
        self._slow = self._codec.prepared[name]
        call.slow_weights, call.slow_scale, call.slow_bias = (t.data_ptr() for t in self._slow)

    def attend(self, call: AttentionCall, out: Tensor, sequences: Sequences | None = None) -> None:
        if sequences is None:
            query, columns = call.query, self.columns
        else:
            query, columns = call.query[sequences.rows].transpose(1, 2), sequences.columns
        batch, heads, queries, size = query.shape
        rows = (query.float() * call.scaling).reshape(batch, self.to.kv_heads, -1, size)
        left = rows.contiguous()  # [B, G, r, D], r = query heads of a key/value head times queries
        weights = self._scores_of(left, columns)
        found = self._weigh(call, left, weights, columns)
        if columns:
            found += self._times_weight(self._sum(weights, columns), sequences is not None)
        states = found.view(batch, heads, queries, size).transpose(1, 2)
        if sequences is None:
            out.copy_(states)
        else:
            out[sequences.rows] = states.to(out.dtype)

    def _scores_of(self, left: Tensor, columns: int) -> Tensor:
        """Scores ``[B, G, r, c * n]`` of queries ``[B, G, r, D]`` with packed keys; those of blocks past the
        limit of a sequence are not written."""
        call, to = self._call, self.to
        scores = left.new_empty(*left.shape[:3], columns * to.block)
        if columns:
            self._point_to_angles()
            _point_to_blocks(call, to, columns)
            call.query, call.scores, call.rows = left.data_ptr(), scores.data_ptr(), left.shape[2]
            self._score(call)
        return scores

    def _weigh(self, call: AttentionCall, left: Tensor, scores: Tensor, columns: int) -> Tensor:
        """Turn scores into weights. Returns the sums ``[B, G, r, D]`` of what is kept as it is."""
        to, found, kept = self.to, torch.empty_like(left), self._point_to_scores(call)
        to.query, to.out, to.query_batches = left.data_ptr(), found.data_ptr(), None
        to.query_batch = to.out_batch = left.stride(0)
        to.query_token = to.out_token = left.shape[3]
        to.query_head = to.out_head = to.queries * left.shape[3]
        self._softmax.scores, self._softmax.columns = scores.data_ptr(), columns
        self._take_softmax(self._softmax)
        del kept  # the library has read it
        return found

    def _sum(self, weights: Tensor, columns: int) -> Tensor:
        """Sums ``[B, G, r, C]`` of what packed values come from by ``weights`` ``[B, G, r, c * n]``."""
        if self._sums is not None:
            return self._sums.of(weights, self.to, columns)
        stream, rows = self._stream, weights.flatten(1, 2)
        assert stream is not None and stream.table is not None
        step = max(TOKENS // (len(rows) * stream.block), 1)
        sums = rows.new_zeros(())
        for part, table in zip(rows.split(step * stream.block, 2), stream.table.split(step, 1), strict=True):
            sums = sums + part @ stream.read_segment(-1, torch.float32, table).flatten(1, 2)
        return sums.view(*weights.shape[:3], -1)

    def _times_weight(self, sums: Tensor, together: bool) -> Tensor:
        """Sums ``[B, G, r, C]`` times the weight of values, ``[B, G, r, D]``; those of all sequences
        ``together``, or of each alone."""
        if not together:
            return sums @ self._value_weight.float()
        by_head = sums.transpose(0, 1)
        values = by_head.flatten(1, 2) @ self._whole_weight
        return values.unflatten(1, by_head.shape[1:3]).transpose(0, 1)

    @cached_property
    def _whole_weight(self) -> Tensor:
        return self._value_weight.float().contiguous()


class ValueSum:
    """Sums of what one layer's values come from, affine codes with ranges per token."""

    def __init__(self, codec: LayerCodec, block: int, isa: str) -> None:
        operand = codec.segments[-1].operand(block)
        assert isinstance(operand, Operand)
        self.call = call = native.RebuildSum()
        self._function = native.function("rebuild_sum", isa)
        call.value.bits, call.value.per_token, call.value.group = operand.bits, True, operand.group
        call.block, call.channels = block, operand.channels

    def of(self, weights: Tensor, blocks: native.Attend, columns: int) -> Tensor:
        """Sums fp32 ``[B, G, r, C]`` of the rows of these blocks by ``weights`` ``[B, G, r, c * n]`` (fp32,
        none below 0); of a sequence, of the blocks up to its limit.

        Raises:
            MemoryError: the library has none.
        """
        call, (batch, heads, rows, _) = self.call, weights.shape
        sums = weights.new_empty(batch, heads, rows, call.channels)
        _point_to_blocks(call, blocks, columns)
        call.weights, call.out, call.rows = weights.data_ptr(), sums.data_ptr(), heads * rows
        self._function(call)
        return sums

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


def _point_to_blocks(
    to: native.RebuildScores | native.RebuildSum, blocks: native.Attend, columns: int
) -> None:
    """To so many columns of the table of another call. Blocks that were cropped have no limit: their columns
    do not follow from it."""
    to.batch, to.columns, to.threads = blocks.batch, columns, blocks.threads
    to.table, to.table_stride = blocks.table, blocks.table_stride
    to.limits = None if blocks.lengths else blocks.limits


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

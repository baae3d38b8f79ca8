"""Attention over keys and values that are rematerialized, some tokens at a time.

Only keys are built. A sum of values is the product of a matrix with the same sum of what they come from, so
that product is taken after the sum, once a part (arXiv 2508.10395 rebuilds both).
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..methods.xquant import Rematerialized
from ..models.base import rotate
from ..quant.ranked import Ranked
from .blockwise import Part, PartedAttention, Running, by_block
from .cpu.ranked import RankedKeys, RankedSum
from .cpu.rebuild import KeyProduct, PackedSum, ValueSum, at_columns

if TYPE_CHECKING:
    from ..store.layer import CompressedLayer

TOKENS = 1024
"""That torch builds keys of at a time, over all sequences; at least a block of each."""
SCORES = 2**21
"""That the library computes at a time, or as many as those tokens have: it keeps no keys."""


class RebuiltAttention(PartedAttention):
    """Decodes what is kept of some tokens, and multiplies it by the key projection."""

    def __init__(self, layer: "CompressedLayer", path: str) -> None:
        super().__init__(layer)
        assert isinstance(layer.codec, Rematerialized)
        self._codec = layer.codec
        self._product: KeyProduct | RankedKeys | None = None
        self._sum: PackedSum | None = None
        last = layer.codec.segments[-1]
        if path == "folded":
            return
        if isinstance(last.quantizer, Ranked):
            self._product, self._sum = RankedKeys(layer, path), RankedSum(layer, path)
            return
        self._product = KeyProduct(layer, path)
        if ValueSum.fits(last, layer.stream.block):
            self._sum = ValueSum(layer, path)

    def _coded(self, left: Tensor, key: Tensor, bias: Tensor | None, limit: int) -> Iterator[Part]:
        layer, codec, stream = self._layer, self._codec, self._layer.stream
        recalled = None
        if codec.reads_below or codec.feeds_above:
            recalled = layer.recalled if layer.recalled is not None else layer.recall()
        tokens = TOKENS
        if self._product is not None:
            tokens = max(SCORES // left[0, ..., 0].numel(), TOKENS)
        step = max(tokens // (len(key) * stream.block), 1)
        for table, columns, part in self._blocks(left, bias, limit, step):
            if self._product is not None:
                scores = self._product.scores(left[:, 0], table, columns)[:, None]
                yield scores, by_block(part, 1), partial(self._weigh_blocks, table=table)
                continue
            if recalled is None:
                rows = stream.read_blocks(codec.view.dtype, table).flatten(1, 2)
            else:
                rows = at_columns(recalled, columns, 1)
            built, source = codec.sources(rows)
            keys = codec.keys(built).unflatten(-1, (codec.view.kv_heads, -1))
            cos, sin = (at_columns(t, columns, 1) for t in layer.index.rope(keys))
            scores = left @ rotate(keys, cos, sin).permute(0, 2, 3, 1)[:, None].float()
            yield scores, by_block(part, 1), partial(self._weigh, source=source)

    def _weigh_blocks(self, weights: Tensor, table: Tensor) -> Tensor:
        """As `_weigh`, with what is packed in the blocks ``table`` ``[B, c]``."""
        if self._sum is None:
            source = self._layer.stream.read_segment(-1, torch.float32, table)
            return self._weigh(weights, source.flatten(1, 2))
        sums = self._sum.of(weights.flatten(1, 3), table)
        return sums.view(*weights.shape[:-1], -1)

    def _weigh(self, weights: Tensor, source: Tensor) -> Tensor:
        """Sums ``[B, 1, G, R * t, Cv]`` of ``source`` ``[B, T, Cv]`` by weights ``[B, 1, G, R * t, T]``."""
        sums = weights.flatten(1, 3).to(source.dtype) @ source
        return sums.float().view(*weights.shape[:-1], -1)

    def _project(self, coded: Running) -> Tensor:
        """See `PartedAttention`: the sums of what values come from, projected."""
        view = self._codec.view
        matrix = self._codec.value_weight.unflatten(0, (view.kv_heads, -1))  # [G, D, Cv]
        sums = coded.sums @ matrix.mT.float()
        bias = self._codec.value_bias
        if bias is not None:
            sums += coded.total * bias.view(view.kv_heads, 1, -1)
        return sums

"""Attention over packed keys and values in torch: scales and zeros are folded into what multiplies the codes.

A key has codes ``q``, so that its channels are ``q_c s_c + z_c``, and a score is ``sum_c (Q_c s_c) q_c +
sum_c Q_c z_c``: the query is scaled once a block, not every key. Values likewise, by token. It equals
attention over `CompressedLayer.read`.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ...models.rotation import apply_rope
from ..blockwise import BlockwiseAttention, OnlineSoftmax, Run, split_bias
from .products import product_of

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer

CHUNK = 1 << 20
"""Elements of keys that are unpacked at a time; at least a block of each sequence."""


class FoldedAttention(BlockwiseAttention):
    """Codes are unpacked, but never become values, nor keys unless they are kept before RoPE."""

    def __init__(self, layer: "CompressedLayer") -> None:
        super().__init__(layer)
        keys, values = layer.codec.segments
        heads, block = layer.codec.view.kv_heads, layer.stream.block
        self._keys = product_of(keys, heads, block, "tokens")
        self._values = product_of(values, heads, block, "channels")

    def _coded(self, left: Tensor, key: Tensor, bias: Tensor | None, limit: int) -> Iterator[Run]:
        layer, stream = self._layer, self._layer.stream
        batch, matrix = len(key), layer.codec.rotations[0]
        if matrix is not None:
            left = left @ matrix.mT
        step = max(CHUNK // (batch * stream.block * layer.codec.view.kv_width), 1)
        for table, columns, part in self._blocks(left, bias, limit, step):
            keys, values = stream.gather(table.flatten())
            if layer.codec.rotated:
                scores = self._keys.times(left, keys)
            else:
                states = self._keys.states(keys, batch)  # [B, c, G, n, D]
                scores = left @ self._rotated(states, key, columns).mT
            weigh = partial(self._values.times, packed=values)
            yield scores, split_bias(part, table.shape[1]), weigh

    def _project(self, coded: OnlineSoftmax) -> Tensor:
        matrix = self._layer.codec.rotations[1]
        return coded.sums if matrix is None else coded.sums @ matrix

    def _rotated(self, keys: Tensor, like: Tensor, columns: Tensor) -> Tensor:
        """Keys ``[B, c, G, n, D]`` as they are after RoPE in these columns ``[c * n]``."""
        offset = self._layer.codec.offset
        if offset is not None:
            keys += offset.view(keys.shape[2], 1, -1)
        blocks = keys.shape[1]
        cos, sin = (t[:, columns].unflatten(1, (blocks, -1)).float() for t in self._layer.index.rope(like))
        return apply_rope(keys, cos, sin)

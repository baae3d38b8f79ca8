"""Attention in torch over keys and values that are rebuilt, some tokens at a time.

A key is ``R(p) norm(W_k x_p + b_k)`` of the decoded row ``x_p``. It equals attention over
`CompressedLayer.read`, which rebuilds all of them at once.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from ...models.rotation import apply_rope
from ..blockwise import Run, split_bias
from ..rebuilding import TOKENS, RebuildingAttention, at_columns, recalled_rows


class DecodedAttention(RebuildingAttention):
    """Decodes what is kept of some tokens, and multiplies it by the key projection."""

    def _coded(self, left: Tensor, key: Tensor, bias: Tensor | None, limit: int) -> Iterator[Run]:
        layer, codec, stream = self._layer, self._codec, self._layer.stream
        recalled = recalled_rows(layer)
        step = max(TOKENS // (len(key) * stream.block), 1)
        for table, columns, hidden in self._blocks(left, bias, limit, step):
            if recalled is None:
                rows = stream.read_blocks(codec.view.dtype, table).flatten(1, 2)
            else:
                (rows,) = at_columns(columns, 1, recalled)
            built, source = codec.sources(rows)
            keys = codec.keys(built).unflatten(-1, (codec.view.kv_heads, -1))
            cos, sin = at_columns(columns, 1, *layer.index.rope(keys))
            scores = left @ apply_rope(keys, cos, sin).permute(0, 2, 3, 1)[:, None].float()
            yield scores, split_bias(hidden, 1), partial(self._weigh, source=source)

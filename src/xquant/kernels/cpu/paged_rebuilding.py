"""Attention over an engine's pages whose keys and values are rebuilt from what is packed: the functions of
`rebuild` and `ranked`, with sequences of unequal length.

The library gives scores with packed keys and sums of what packed values come from; what is between them, and
the tokens that are not packed, are torch's.
"""

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...models.rope import Pair
from ...store.pages import PageLayout
from ..paged import PagedAngles, PagedAttention, Sequences
from .rebuild import KeyScores, PackedSum


class NativeRebuiltPages(PagedAttention):
    """Attends over one layer.

    Args:
        scores: with its packed keys.
        sums: of what its packed values come from.
        softcap: of scores; 0 for none.
    """

    def __init__(
        self,
        codec: LayerCodec,
        layout: PageLayout,
        scores: KeyScores,
        sums: PackedSum,
        scaling: float,
        softcap: float,
        angles: PagedAngles,
    ) -> None:
        rebuilt = codec.rematerialized
        assert rebuilt is not None
        self._layout, self._scores, self._sums = layout, scores, sums
        self._scaling, self._softcap = scaling, softcap
        self._angles = scores.angles_of(*angles.every)
        self._heads, self._size = codec.view.kv_heads, codec.view.head_size
        matrix = rebuilt.value_weight.float().unflatten(0, (self._heads, -1))  # [G, D, C]
        self._back = matrix.mT.contiguous()
        bias = rebuilt.value_bias
        self._bias = None if bias is None else bias.float().view(self._heads, 1, -1)

    def bind(self, pages: Tensor, rings: Tensor) -> None:
        self._rings = rings
        self._addresses = self._layout.addresses(pages)
        for to, number in ((self._scores.call.key, 0), (self._sums.call.value, -1)):
            for name, blocks in self._addresses[number].items():
                setattr(to, name, blocks.data_ptr())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, out: Tensor
    ) -> None:
        rows, heads = sequences.rows, self._heads
        left = query[rows].float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        grouped = left.shape[:4]  # B, G, heads of a group, t
        left = left.flatten(2, 3) * self._scaling
        keys, values = self._exact(key, value, sequences)
        scores = left @ keys.mT
        packed = sequences.columns * sequences.block
        if packed:
            table = sequences.table[:, : sequences.columns]
            angles = self._shared(len(table))
            coded = self._scores.scores(left, table, angles, sequences.limits)
            scores = torch.cat([coded, scores], -1)
        if self._softcap:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        by_query = scores.view(*grouped, -1)
        by_query[..., :packed].masked_fill_(sequences.beyond[:, None, None, None], -torch.inf)
        by_query[..., packed:].masked_fill_(sequences.unseen[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        found = weights[..., packed:] @ values
        if packed:
            coded = weights[..., :packed]
            sums = self._sums.of(coded.flatten(1, 2), table, sequences.limits)
            found += sums.view(*coded.shape[:3], -1) @ self._back
            if self._bias is not None:
                found += coded.sum(-1, keepdim=True) * self._bias
        found = found.view(*grouped, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
        out[rows] = found.to(out.dtype)

    def _exact(self, key: Tensor, value: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Keys and values of ring and new rows, ``[B, G, most_held + t, D]``, fp32."""
        held = self._rings[sequences.places].unflatten(-1, (2, self._heads, self._size)).float()
        # What is in places of no token may be anything, and 0 times infinity is no number.
        absent = sequences.unseen[:, -1, : sequences.most_held]
        held = held.masked_fill(absent[:, :, None, None, None], 0)
        new = (key[sequences.rows].float(), value[sequences.rows].float())
        keys, values = (
            torch.cat([held[:, :, number], own], 1).transpose(1, 2)
            for number, own in enumerate(new)
        )
        return keys, values

    def _shared(self, batch: int) -> Pair:
        cos, sin = (t.expand(batch, -1, -1) for t in self._angles)
        return cos, sin

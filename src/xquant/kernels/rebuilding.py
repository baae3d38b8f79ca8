"""Blockwise attention over keys and values that are rebuilt from what is packed in their place.

Only keys are rebuilt. ``sum_t w_t (W x_t) = W sum_t w_t x_t``: the rows that values come from are summed by
the weights of the softmax, and the value projection is applied once to each sum (arXiv 2508.10395 rebuilds
values too).
"""

from typing import TYPE_CHECKING

from torch import Tensor

from .blockwise import BlockwiseAttention, OnlineSoftmax

if TYPE_CHECKING:
    from ..past.growing_layer import CompressedLayer

TOKENS = 1024
"""Whose keys are built at a time, over all sequences; at least a block of each."""


class RebuildingAttention(BlockwiseAttention):
    """What backends share that rebuild keys."""

    def __init__(self, layer: "CompressedLayer") -> None:
        super().__init__(layer)
        codec = layer.codec.rematerialized
        assert codec is not None
        self._codec = codec

    def _weigh(self, weights: Tensor, source: Tensor) -> Tensor:
        """Sums ``[B, 1, G, R * t, Cv]`` of ``source`` ``[B, T, Cv]`` by weights ``[B, 1, G, R * t, T]``."""
        sums = weights.flatten(1, 3).to(source.dtype) @ source
        return sums.float().view(*weights.shape[:-1], -1)

    def _project(self, coded: OnlineSoftmax) -> Tensor:
        view = self._codec.view
        matrix = self._codec.value_weight.unflatten(0, (view.kv_heads, -1))  # [G, D, Cv]
        sums = coded.sums @ matrix.mT.float()
        bias = self._codec.value_bias
        if bias is not None:
            sums += coded.total * bias.view(view.kv_heads, 1, -1)
        return sums


def at_columns(columns: Tensor, dim: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """What stands in these columns along ``dim`` of each of ``rows``, views where they follow each other."""
    first, count = int(columns[0]), len(columns)
    if bool((columns.diff() == 1).all()):
        return tuple(each.narrow(dim, first, count) for each in rows)
    return tuple(each.index_select(dim, columns) for each in rows)


def recalled_rows(layer: "CompressedLayer") -> Tensor | None:
    """What a layer recalls of its sealed tokens ``[B, T, .]``, where that takes the layers below; None where
    every block tells its own."""
    if not layer.codec.sums_deltas:
        return None
    recalled = layer.of_pass.recalled if layer.of_pass.recalled is not None else layer.recall()
    assert recalled is not None
    return recalled

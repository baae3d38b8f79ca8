"""Attention over an engine's pages whose keys and values are rebuilt from affine codes: the functions of
`rebuild`, with sequences of unequal length.

The library gives scores with packed keys, their softmax together with the tokens that are kept as they are
(csrc/weigh.h), and sums of what packed values come from. Products with weights are torch's.
"""

import ctypes

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...store.pages import PageLayout
from ..paged import PagedAngles, PagedAttention, Sequences
from . import library as native
from .attention import describe_heads
from .paged import ExactRows
from .rebuild import KeyProduct, ValueSum
from .turning import of_pages


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
        isa: str,
        scores: KeyProduct,
        sums: ValueSum,
        scaling: float,
        softcap: float,
        angles: PagedAngles,
    ) -> None:
        rebuilt, view, library = codec.rematerialized, codec.view, native.library()
        assert rebuilt is not None and library is not None
        self._function = getattr(library, f"xq_weigh_{isa}")
        self._layout, self._scores, self._sums = layout, scores, sums
        self._scaling = scaling
        self._angles = of_pages(angles)
        self._heads = view.kv_heads
        matrix = rebuilt.value_weight.float().unflatten(0, (self._heads, -1))  # [G, D, C]
        self._back = matrix.mT.contiguous()
        self._call = native.Weigh()
        call = self._call.attend
        self._exact = ExactRows(call, view)
        describe_heads(call, view, layout.block)
        call.dtype, call.scaling, call.softcap = native.DTYPES[torch.float32], 1, softcap
        if rebuilt.value_bias is not None:
            self._bias = rebuilt.value_bias.float().contiguous()
            self._call.value_bias = native.address(self._bias, torch.float32, view.kv_width)

    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        self._addresses = self._layout.addresses(pages)
        for to, number in ((self._scores.call.key, 0), (self._sums.call.value, -1)):
            for name, blocks in self._addresses[number].items():
                setattr(to, name, blocks.data_ptr())
        self._exact.bind(rings, sinks)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, out: Tensor
    ) -> None:
        rows, heads = sequences.rows, self._heads
        grouped = query[rows].float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        left = (grouped * self._scaling).flatten(
            2, 3
        )  # [B, G, r, D], r = query heads times queries
        table = sequences.table[:, : sequences.columns]
        weights = left[..., :0]
        if sequences.columns:
            weights = self._scores.scores(left, table, self._angles, sequences.limits)
        found = self._weigh(left, key, value, sequences, weights)
        if sequences.columns:
            sums = self._sums.of(weights.flatten(1, 2), table, sequences.limits)
            by_head = sums.unflatten(1, (heads, -1)).transpose(0, 1)  # [G, B, r, C]
            coded = by_head.flatten(1, 2) @ self._back
            found += coded.unflatten(1, by_head.shape[1:3]).transpose(0, 1)
        queries = found.view(grouped.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
        out[rows] = queries.to(out.dtype)

    def _weigh(
        self, left: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Tensor
    ) -> Tensor:
        """Turn scores into weights; what is kept as it is, weighed and summed ``[B, G, r, D]``."""
        call, found = self._call.attend, torch.empty_like(left)
        kept = self._exact.point(key, value, sequences)
        call.query, call.out = left.data_ptr(), found.data_ptr()
        call.query_batch = call.out_batch = left.stride(0)
        call.query_token = call.out_token = left.shape[3]
        call.query_head = call.out_head = sequences.queries * left.shape[3]
        self._call.scores, self._call.columns = scores.data_ptr(), sequences.columns
        if self._function(ctypes.byref(self._call)):
            raise MemoryError("not enough memory to attend over pages")
        del kept  # the library has read it
        return found

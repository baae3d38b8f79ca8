"""What the library attends to as it is: the tail, the sinks and the newest tokens of a cache."""

import torch
from torch import Tensor

from ...models.rotation import Pair
from ...store.built import States
from ...store.layer import CompressedLayer
from ..call import FLOATS, AttentionCall
from . import library as native

Rows = Tensor | States
"""Of tokens: keys beside values ``[B, t, 2 G D]``, or both apart, ``[B, t, G*D]`` each."""


class ExactTokens:
    """Points a call to the tokens of one layer that are kept as they are, and to all else but the query, the
    output, and what is packed.

    Args:
        to: the call.
        layer: whose tokens they are.
    """

    def __init__(self, to: native.Attend, layer: CompressedLayer) -> None:
        self._to, self._layer = to, layer
        self._width, self._head_size = layer.codec.view.kv_width, layer.codec.view.head_size
        self._limits, self._limit = torch.empty(0, dtype=torch.int32, device="cpu"), -1

    def point(
        self,
        call: AttentionCall,
        before: int,
        tail: Rows | None,
        sinks: Rows | None,
        angles: tuple[Pair, Pair] | None,
    ) -> list[Tensor]:
        """Point to the tokens of this ``call``.

        Args:
            before: tokens of the ``tail`` that come before the newest.
            tail: rows of the tokens after what is sealed, and perhaps of the newest; None where ``before``
                is 0.
            sinks: of sinks.
            angles: cos and sin of the tail and of the sinks, fp32 ``[B, ., R/2]``; None where keys are
                rotated.

        Returns:
            what is pointed to, to be kept until the library was called.
        """
        to, layer, mask = self._to, self._layer, call.mask
        batch, _, queries, _ = call.key.shape
        past = layer.tokens - queries
        limit = min(layer.stream.tokens, past)
        if limit != self._limit or len(self._limits) != batch:
            self._limits = torch.full((batch,), limit, dtype=torch.int32, device="cpu")
            self._limit = limit
        to.batch, to.queries, to.limits = batch, queries, self._limits.data_ptr()
        to.softcap, to.threads = call.softcap or 0.0, torch.get_num_threads()
        kept: list[Tensor] = []
        to.sink_logits = to.mask = None
        if call.sink_logits is not None:
            kept.append(call.sink_logits.float().contiguous())
            to.sink_logits = kept[-1].data_ptr()
        if mask is not None:
            to.mask, to.mask_dtype = mask.data_ptr(), native.DTYPES[mask.dtype]
            strides = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
            to.mask_batch, _, to.mask_query, to.mask_token = strides
        count = 0
        if tail is not None:
            self._point(to.exact[0], tail, batch, before, angles and angles[0], kept)
            to.exact[0].start, to.exact[0].column = limit, None
            count = 1
        if sinks is not None:
            assert layer.sinks is not None
            columns, exact = layer.sinks.columns, to.exact[count]
            self._point(exact, sinks, batch, columns.shape[1], angles and angles[1], kept)
            exact.start, exact.column = 0, native.address(columns, torch.int32, *columns.shape)
            count += 1
        newest, (key, value) = to.exact[count], _alike(call.key, call.value)
        newest.key, newest.value = key.data_ptr(), value.data_ptr()
        newest.cos = newest.sin = newest.column = None
        newest.batch_stride, newest.head_stride, newest.token_stride, _ = key.stride()
        newest.dtype, newest.count = native.DTYPES[key.dtype], queries
        newest.start, newest.causal = past, 1
        to.exact_count = count + 1
        kept += key, value
        return kept

    def _point(
        self,
        exact: native.Exact,
        rows: Rows,
        batch: int,
        count: int,
        angles: Pair | None,
        kept: list[Tensor],
    ) -> None:
        """Point to ``count`` tokens. What is pointed to, and the cache does not hold, is ``kept``."""
        width = self._width
        if isinstance(rows, Tensor):
            shape = batch, rows.shape[1], 2 * width
            exact.key = start = native.address(rows, FLOATS, *shape, rows=True)
            exact.value = start + width * rows.itemsize
            kept.append(rows)
        else:
            keys, values = _alike(*rows)
            shape = batch, keys.shape[1], width
            exact.key, exact.value = (
                native.address(t, FLOATS, *shape, rows=True) for t in (keys, values)
            )
            rows = keys
            kept += keys, values
        exact.batch_stride, exact.token_stride, _ = rows.stride()
        exact.head_stride, exact.dtype = self._head_size, native.DTYPES[rows.dtype]
        exact.count, exact.causal = count, 0
        exact.cos = exact.sin = None
        if angles is not None:
            cos, sin = angles
            shape = batch, count, cos.shape[2]
            exact.cos, exact.sin = (native.address(t, torch.float32, *shape) for t in (cos, sin))
            exact.pairs = cos.shape[2]
            kept += cos, sin


def _alike(key: Tensor, value: Tensor) -> States:
    """Keys and values of one dtype and the same strides, their channels side by side."""
    if key.dtype != value.dtype:
        dtype = torch.promote_types(key.dtype, value.dtype)
        key, value = key.to(dtype), value.to(dtype)
    if key.stride() != value.stride() or key.stride(-1) != 1:
        return key.contiguous(), value.contiguous()
    return key, value

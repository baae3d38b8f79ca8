"""What the library attends to as it is: the tail, the sinks and the newest tokens of a cache."""

import torch
from torch import Tensor

from ...models.rotation import Pair
from ...store.built import States
from ...store.layer import CompressedLayer
from ..call import FLOATS, AttentionCall
from . import library as native


def point_to_kept(
    to: native.Attend,
    layer: CompressedLayer,
    call: AttentionCall,
    tail: States | None,
    sinks: States | None,
    angles: tuple[Pair, Pair] | None,
) -> list[Tensor]:
    """Set all of ``to`` but the query, the output, and what is packed.

    Args:
        tail: keys and values ``[B, t, G*D]`` of the tokens between what is sealed and the newest.
        sinks: of the sinks, ``[B, S, G*D]``.
        angles: cos and sin of the tail and of the sinks, fp32 ``[B, ., R/2]``; None where keys are rotated.

    Returns:
        what is pointed to, to be kept until the library was called.
    """
    key, value, mask = call.key, call.value, call.mask
    batch, _, queries, _ = key.shape
    past = layer.tokens - queries
    limit = min(layer.stream.tokens, past)
    limits = torch.full((batch,), limit, dtype=torch.int32, device="cpu")
    to.batch, to.queries, to.limits = batch, queries, limits.data_ptr()
    to.softcap, to.threads = call.softcap or 0.0, torch.get_num_threads()
    kept = [limits]
    to.sink_logits = to.mask = None
    if call.sink_logits is not None:
        kept.append(call.sink_logits.float().contiguous())
        to.sink_logits = kept[-1].data_ptr()
    if mask is not None:
        to.mask, to.mask_dtype = mask.data_ptr(), native.DTYPES[mask.dtype]
        strides = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
        to.mask_batch, _, to.mask_query, to.mask_token = strides
    each = zip((tail, sinks), angles or (None, None), (limit, 0), strict=True)
    count = 0
    for rows, turned, start in each:
        if rows is None:
            continue
        exact, (keys, values) = to.exact[count], _alike(*rows)
        shape = batch, rows[0].shape[1], layer.codec.view.kv_width
        exact.key, exact.value = (
            native.address(t, FLOATS, *shape, rows=True) for t in (keys, values)
        )
        exact.batch_stride, exact.token_stride, _ = keys.stride()
        exact.head_stride, exact.dtype = layer.codec.view.head_size, native.DTYPES[keys.dtype]
        exact.count, exact.start, exact.causal = keys.shape[1], start, 0
        exact.cos = exact.sin = exact.column = None
        kept += [keys, values]
        if turned is not None:
            angles_of = (*shape[:2], turned[0].shape[2])
            exact.cos, exact.sin = (native.address(t, torch.float32, *angles_of) for t in turned)
            exact.pairs = turned[0].shape[2]
            kept += turned
        if rows is sinks:
            assert layer.sinks is not None
            exact.column = native.address(layer.sinks.columns, torch.int32, *shape[:2])
        count += 1
    newest, (key, value) = to.exact[count], _alike(key, value)
    newest.key, newest.value = key.data_ptr(), value.data_ptr()
    newest.cos = newest.sin = newest.column = None
    newest.batch_stride, newest.head_stride, newest.token_stride, _ = key.stride()
    newest.dtype, newest.count = native.DTYPES[key.dtype], queries
    newest.start, newest.causal = past, 1
    to.exact_count = count + 1
    return [*kept, key, value]


def _alike(key: Tensor, value: Tensor) -> States:
    """Keys and values of one dtype and the same strides, their channels side by side."""
    if key.dtype != value.dtype:
        dtype = torch.promote_types(key.dtype, value.dtype)
        key, value = key.to(dtype), value.to(dtype)
    if key.stride() != value.stride() or key.stride(-1) != 1:
        return key.contiguous(), value.contiguous()
    return key, value

"""Attention of a chunk of a prompt over a past that is decoded, by torch's flash attention on a CPU.

The model's own attention repeats keys and values for each query head, and adds a mask to all scores. But
every token of a chunk sees all of the past. So the query heads of a key/value head are rows of one product
with the past, without a mask, and only the new tokens among themselves need one. Each part gives the log
of the sum of its exponentials, by which they are joined.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...past.growing_layer import CompressedLayer
from ...past.tokens import visible
from ..call import AttentionCall

Part = tuple[Tensor, Tensor]
"""What attention over some tokens gives, ``[B, H, t, D]``, and the logarithm of its sum, ``[B, H, t]``."""

_flash: Callable[..., Part] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class ChunkAttention:
    """Attends for chunks at the layers of one cache."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget what holds for one forward pass only."""
        self._seen: Any = None
        self._causal = False

    def attend(self, layer: CompressedLayer, call: AttentionCall) -> Tensor | None:
        """Attention of the newest tokens over their past and themselves, ``[B, t, H, D]``; None where the
        model must attend: over latents, with padding or another mask that is not causal, with sink logits or
        softcapping, and on a GPU."""
        view = layer.codec.view
        unlike = view.latents is not None or view.value_size != view.head_size
        if unlike or view.device.type != "cpu" or call.softcap or call.sink_logits is not None:
            return None
        fitted = call.fitted(layer)
        if fitted is None or not self._is_causal(fitted.mask, fitted.query.shape[2], layer.tokens):
            return None
        query, key, value = fitted.query, fitted.key, fitted.value
        heads = query.shape[1] // key.shape[1]
        rows = query.unflatten(1, (-1, heads)).flatten(2, 3)
        parts = []
        for states in layer.read_parts(layer.tokens - query.shape[2]):
            keys, values = (each.transpose(1, 2).to(query.dtype) for each in states)
            out, total = _flash(rows, keys, values, scale=fitted.scaling)
            parts.append(
                (out.unflatten(2, (heads, -1)).flatten(1, 2), total.unflatten(2, (heads, -1)).flatten(1, 2))
            )
        layer.release_below()
        keys, values = (each.repeat_interleave(heads, 1) for each in (key, value))
        parts.append(_flash(query, keys, values, is_causal=True, scale=fitted.scaling))
        return _joined(parts).transpose(1, 2).to(query.dtype)

    def _is_causal(self, mask: Tensor | None, queries: int, tokens: int) -> bool:
        """Whether each of the newest tokens sees those before it, and itself, and nothing else. All layers
        are given one mask, which is looked at once."""
        if mask is None:
            return True
        if mask is not self._seen:
            every = torch.ones(queries, tokens, dtype=torch.bool, device=mask.device)
            wanted = every.tril_(tokens - queries).expand(*mask.shape[:2], -1, -1)
            self._seen, self._causal = mask, torch.equal(visible(mask).expand_as(wanted), wanted)
        return self._causal


def _joined(parts: list[Part]) -> Tensor:
    """Attention over the tokens of all ``parts``, fp32."""
    totals = torch.stack([total for _, total in parts])
    weights = totals.softmax(0)[..., None]
    found = parts[0][0] * weights[0]
    for (out, _), weight in zip(parts[1:], weights[1:], strict=True):
        found.addcmul_(out.float(), weight)
    return found

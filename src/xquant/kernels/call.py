"""AttentionCall: what one call of a layer's attention is given, whatever answers it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..past.growing_layer import CompressedLayer

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that kernels read states in."""
MASKED = (torch.bool, *FLOATS)


class AttentionCall(NamedTuple):
    """The newest ``t`` tokens at one layer, as the attention function gets them, and how scores are made.

    An engine runs sequences with different numbers of new tokens, ``T`` together, and has their states after
    each other."""

    query: Tensor
    """``[B, H, t, D]``; of an engine ``[T, H, D]``."""
    key: Tensor
    """Their exact states, rotated, as the values: ``[B, G, t, D]``; of an engine ``[T, G, D]``."""
    value: Tensor
    mask: Tensor | None
    """Over all tokens, bool or added to scores, ``[B, 1, t, T]``; None for causal."""
    scaling: float
    softcap: float | None
    sink_logits: Tensor | None = None
    """Learned, ``[H]``: one more term of each query head's softmax, which has no value (gpt-oss)."""

    @property
    def float_logits(self) -> Tensor | None:
        """The sink logits as kernels read them."""
        return None if self.sink_logits is None else self.sink_logits.float().contiguous()

    @property
    def is_plain(self) -> bool:
        """Whether mask and sink logits are such as kernels can read."""
        mask, logits = self.mask, self.sink_logits
        if logits is not None and logits.shape != self.query.shape[1:2]:
            return False
        return mask is None or (mask.dtype in MASKED and mask.dim() == 4 and mask.shape[1] == 1)

    def form(self, out: Tensor) -> tuple[object, ...]:
        """All that a call without a mask asks, and where it goes, but for where these states lie."""
        query, key, value, _, scaling, softcap, logits = self
        return (
            scaling,
            softcap,
            logits is None,
            *[(t.shape, t.stride(), t.dtype, t.device) for t in (query, key, value, out)],
        )

    def by_row(self) -> "AttentionCall":
        """The same as of an engine, whose tokens are no padding and each come before the next."""
        query, key, value, _, scaling, softcap, _ = self
        return AttentionCall(_rows(query), _rows(key), _rows(value), None, scaling, softcap)

    def new_out(self) -> Tensor:
        """``[B, t, H, D]``, not written yet."""
        batch, heads, count, size = self.query.shape
        return self.query.new_empty((batch, count, heads, size))

    def fitted(self, layer: "CompressedLayer") -> "AttentionCall | None":
        """The same call for a kernel, which goes through memory by what this says of it: states in one dtype,
        the query's. None where the reference must answer. Under autocast a model may give keys and values
        in two.

        Raises:
            ValueError: states of another shape than the layer's, or on another device.
        """
        query, key, value, mask, _, _, logits = self
        tail, view, count = layer.tail, layer.codec.view, query.shape[-2]
        assert tail is not None
        batch, home = tail.shape[0], tail.device
        if query.dtype not in FLOATS or not self.is_plain:
            return None
        states = batch, view.kv_heads, count, view.head_size
        _check("query", query, (batch, view.query_heads, count, view.head_size), home)
        _check("key", key, states, home)
        _check("value", value, states, home)
        if mask is not None:
            every = (batch, 1, count, layer.tokens)
            if any(n not in (1, size) for n, size in zip(mask.shape, every, strict=True)):
                return None
            _check("mask", mask, mask.shape, home)
        if logits is not None:
            _check("sink_logits", logits, logits.shape, home)
        if key.dtype == value.dtype == query.dtype:
            return self
        return self._replace(key=key.to(query.dtype), value=value.to(query.dtype))


def _rows(states: Tensor) -> Tensor:
    """States ``[B, H, t, D]`` of each new token, ``[B t, H, D]``."""
    return states.squeeze(2) if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)


def mask_strides(mask: Tensor | None) -> tuple[int, int, int]:
    """Of sequences, queries and tokens of a mask ``[B, 1, t, T]``; 0 where there is one for all."""
    if mask is None:
        return 0, 0, 0
    sizes = zip(mask.stride(), mask.shape, strict=True)
    batch, _, query, token = (stride if size > 1 else 0 for stride, size in sizes)
    return batch, query, token


def _check(name: str, given: Tensor, shape: Sequence[int], home: torch.device) -> None:
    """Raise ValueError unless what is ``given`` is of this shape and on this device."""
    if given.shape != shape or given.device != home:
        raise ValueError(
            f"a kernel wants a {name} {list(shape)} on {home}, not {list(given.shape)} on {given.device}"
        )

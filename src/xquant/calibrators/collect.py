"""Runs a model over samples, and gives a calibrator each layer's keys and values with their gradients.

Gradients are of the loss with respect to the keys and values that a cache is given. RoPE is a rotation
times a factor, so its transpose turns gradients of rotated keys into gradients of keys before RoPE.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from .. import compat
from ..methods import LayerCodec
from ..methods.key_value import flat_heads
from ..models import AttentionView
from ..models.base import rotate
from ..seam.hooks import Attachment, attach
from ..seam.passes import Given, ObservingCache
from .calibrator import Rows, Stage


class _Recorder(DynamicCache, ObservingCache):
    """A cache for one forward pass that keeps the inputs of the compressed layers."""

    def __init__(self, attachment: Attachment, gradients: bool) -> None:
        super().__init__(config=compat.text_config(attachment.view.model))
        self.attachment, self.gradients = attachment, gradients
        self.seen: dict[int, Any] = {}

    def begin(self, batch: int, length: int, mask: Any) -> None:
        self.seen.clear()

    def observe(self, view: AttentionView, given: Given) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.attachment.hooks:
            own: tuple[Tensor, Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
            return own
        if self.gradients and not key_states.requires_grad:  # the lowest layer
            key_states = key_states.detach().requires_grad_()
            value_states = value_states.detach().requires_grad_()
        self.seen[layer_idx] = self.attachment.inputs(layer_idx, key_states, value_states)
        return key_states, value_states

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return key, value, mask

    def finish(self, failed: bool = False) -> None:
        pass


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Turn gradients of the weights off, so that the backward pass keeps memory for states alone."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


def collect(
    model: Any,
    samples: Tensor,
    codecs: Sequence[LayerCodec],
    stage: Stage,
    done: Callable[[], None],
) -> None:
    """Give ``stage`` the keys and values of every sample ``[N, T]`` (token ids) at every layer; ``done`` is
    called after each sample."""
    attachment = attach(model)
    with _frozen(model), torch.set_grad_enabled(stage.gradients):
        for sample in samples.to(model.device):
            _collect_one(model, attachment, sample, codecs, stage)
            done()


def _collect_one(
    model: Any, attachment: Attachment, sample: Tensor, codecs: Sequence[LayerCodec], stage: Stage
) -> None:
    recorder = _Recorder(attachment, stage.gradients)
    logits = model(sample[None], past_key_values=recorder, use_cache=True).logits[0, :-1]
    seen = [recorder.seen[codec.view.index] for codec in codecs]
    gradients: list[Tensor | None] = [None] * (2 * len(seen))
    if stage.gradients:
        loss = F.cross_entropy(logits.float(), sample[1:])
        states = [t for s in seen for t in (s.key, s.value)]
        gradients = list(torch.autograd.grad(loss, states))
    del logits
    with torch.no_grad():
        for position, (codec, states) in enumerate(zip(codecs, seen, strict=True)):
            rows = codec.encode(codec.features(states).unsqueeze(1), None)[0, 0].detach()
            key, value = rows.split(codec.view.kv_width, -1)
            key_gradient, value_gradient = gradients[2 * position : 2 * position + 2]
            if key_gradient is not None and value_gradient is not None:
                key_gradient = _before_rope(codec, key_gradient, attachment)
                value_gradient = flat_heads(value_gradient)[0]
            stage.see(position, Rows(key, value, key_gradient, value_gradient))


def _before_rope(codec: LayerCodec, gradient: Tensor, attachment: Attachment) -> Tensor:
    """Gradients ``[T, G*D]`` of keys as ``codec`` stores them, from gradients ``[1, G, T, D]`` of rotated
    keys."""
    if not codec.rotated:
        heads = gradient.transpose(1, 2)
        positions = torch.arange(heads.shape[1], device=heads.device)[None]
        cos, sin = attachment.view.rope(heads, positions)
        gradient = rotate(heads, cos, -sin).transpose(1, 2)
    return flat_heads(gradient)[0]

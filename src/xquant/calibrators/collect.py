"""Runs a model over samples, and gives calibrators each layer's keys and values with their gradients and the
queries that meet them.

Gradients of states are of the loss with respect to the keys and values that a cache is given. RoPE is a
rotation times a factor, so its transpose makes gradients of keys before RoPE of those of rotated keys.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from .. import compat
from ..kernels.call import AttentionCall
from ..methods import LayerCodec
from ..methods.key_value import flat_heads
from ..models.rotation import apply_rope
from ..models.weights import home
from ..seam.hooks import Attachment, attach
from ..seam.passes import LayerInputs, ObservingCache, Route
from .calibrator import Rows, Stage


class _Recorder(DynamicCache, ObservingCache):
    """A cache for one forward pass that keeps the inputs of the compressed layers, and their queries."""

    attachment: Attachment

    def __init__(self, attachment: Attachment, gradients: bool, queries: bool) -> None:
        super().__init__(config=compat.text_config(attachment.view.model))
        self.attachment, self.gradients, self.asks_queries = attachment, gradients, queries
        self.seen: dict[int, Any] = {}
        self.queries: dict[int, Tensor] = {}

    def begin(self, batch: int, length: int, mask: Any) -> None:
        self.seen.clear()

    def observe(self, given: LayerInputs) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.attachment.hooks:
            own: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return own
        if self.gradients and not key_states.requires_grad:  # the lowest layer
            key_states = key_states.detach().requires_grad_()
            value_states = value_states.detach().requires_grad_()
        inputs = self.attachment.inputs(layer_idx, key_states, value_states)
        self.seen[layer_idx] = inputs
        # What the model goes on with comes from what is seen: gradients are of that.
        hooks = self.attachment.hooks[layer_idx]
        key = hooks.view.as_in_model(inputs.key)
        if not self.asks_queries:
            return key, value_states
        if hooks.passes_on is False or hooks.view.latents is not None:
            family = type(self.attachment.view.model).__name__
            raise ValueError(
                f"the queries of {family} cannot be seen: layer {layer_idx} does not leave attention over"
                " the keys of its cache to transformers' attention function (eager or sdpa)"
            )
        return self.attachment.return_states(layer_idx, key, value_states, Route.NEWEST)

    def see(self, index: int, call: AttentionCall) -> None:
        self.queries[index] = call.query.detach()

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return key, value, mask

    def finish(self, failed: bool = False) -> None:
        pass


@contextmanager
def frozen(model: torch.nn.Module, but: Iterable[Tensor] = ()) -> Iterator[None]:
    """Have a backward pass compute gradients of no weights ``but`` some, and keep memory for those alone."""
    wanted = {id(weight) for weight in but}
    switched = [p for p in model.parameters() if p.requires_grad != (id(p) in wanted)]
    for parameter in switched:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in switched:
            parameter.requires_grad_(not parameter.requires_grad)


def collect(
    model: Any,
    samples: Tensor,
    stages: Sequence[tuple[Sequence[LayerCodec], Stage]],
    done: Callable[[], None],
) -> None:
    """Give every stage the keys and values of every sample ``[N, T]`` (token ids) at every layer, as its own
    codecs pack them. ``done`` is called after each sample."""
    attachment = attach(model)
    with frozen(model):
        for sample in samples.to(home(model)):
            asking = [stage.gradients for _, stage in stages]
            with torch.set_grad_enabled(any(asking)):
                _collect_one(model, attachment, sample, stages, asking)
            done()


def _collect_one(
    model: Any,
    attachment: Attachment,
    sample: Tensor,
    stages: Sequence[tuple[Sequence[LayerCodec], Stage]],
    asking: Sequence[bool],
) -> None:
    wanted = torch.is_grad_enabled()
    recorder = _Recorder(attachment, wanted, any(stage.queries for _, stage in stages))
    logits = model(sample[None], **{compat.CACHE: recorder}, use_cache=True).logits[0, :-1]
    seen, gradients = recorder.seen, dict[int, tuple[Tensor, Tensor]]()
    if wanted:
        loss = mean_loss(logits, sample)
        if not loss.requires_grad:
            raise ValueError(
                f"no gradients reach the keys and values of {type(model).__name__}, perhaps because its"
                " weights are quantized: use a method that needs none, such as kivi or kvquant with"
                " weighting=none"
            )
        states = [t for s in seen.values() for t in (s.key, s.value)]
        found = torch.autograd.grad(loss, states)
        gradients = dict(zip(seen, zip(found[::2], found[1::2], strict=True), strict=True))
    del logits
    with torch.no_grad():
        for (codecs, stage), asks in zip(stages, asking, strict=True):
            for position, codec in enumerate(codecs):
                index = codec.view.index
                given = gradients[index] if asks else None
                rows = _rows(codec, seen[index], given, sample, attachment)
                if stage.queries:
                    rows.query = flat_heads(recorder.queries[index])[0]
                stage.see(position, rows)


def _rows(
    codec: LayerCodec,
    states: Any,
    gradients: tuple[Tensor, Tensor] | None,
    ids: Tensor,
    attachment: Attachment,
) -> Rows:
    rows = codec.encode(codec.features(states).unsqueeze(1), None)[0, 0].detach()
    key, value = rows.tensor_split([codec.view.kv_width], -1)
    if gradients is None:
        return Rows(key, value, None, None, ids)
    key_gradient = _before_rope(codec, gradients[0], attachment)
    return Rows(key, value, key_gradient, flat_heads(gradients[1])[0], ids)


def mean_loss(logits: Tensor, sample: Tensor) -> Tensor:
    """The mean loss per token of the predictions ``[T - 1, V]`` of a sample ``[T]``."""
    return F.cross_entropy(logits.float(), sample[1:])


def _before_rope(codec: LayerCodec, gradient: Tensor, attachment: Attachment) -> Tensor:
    """Gradients ``[T, G*D]`` of keys as ``codec`` stores them, from gradients ``[1, G, T, D]`` of rotated
    keys."""
    if not codec.rotated:
        heads = gradient.transpose(1, 2)
        positions = torch.arange(heads.shape[1], device=heads.device)[None]
        cos, sin = attachment.view.rope(heads, positions)
        gradient = apply_rope(heads, cos, -sin).transpose(1, 2)
    return flat_heads(gradient)[0]

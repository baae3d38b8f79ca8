"""LayerHooks: what is seen at one attention layer, and what is known of how it attends."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backend import unread
from ..kernels.choose import warn_of_torch
from ..methods import LayerCodec
from ..models import AttentionView
from ..models.rotation import Pair
from .naming import PREFIX, FunctionName
from .passes import Attached, LayerInputs, LayerPass, ReturnedStates, split_axes
from .watched import plain

NAME = "_xquant_hooks"
"""Of the attribute of an attention layer that has its hooks."""
NEWEST = 8
"""Tokens whose keys and values are compared with those that latents give."""


class LayerHooks:
    """The hooks of one attention layer."""

    def __init__(self, attachment: Attached, view: AttentionView) -> None:
        self.attachment, self.view, self.index = attachment, view, view.index
        self.lowest = view is attachment.view.compressed[0]
        """Whether it is the lowest compressed layer, which shows the cache positions and mask for all."""
        self.absorbs: bool | None = None
        """Whether attention over latents replaces that over keys and values; None where that was not seen."""
        self.named: FunctionName
        """Of the attention function that the layer calls."""
        self._passes_on: dict[str, bool] = {}
        """By attention implementation: whether the layer passes on what a cache returns, and does nothing
        else with it."""
        self.traced: LayerPass | None = None
        """See `tracing`; None until the layer begins, and once it attends."""

    def see_expanded(self, returned: ReturnedStates, key: Tensor, value: Tensor) -> None:
        """Learn whether the keys and values ``[B, H, T, .]`` that the layer attends to are nothing but its
        latents, expanded as we expand them. Then a decode step can attend to the latents instead."""
        latents = self.view.latents
        if latents is None or self.absorbs is not None:
            return
        newest = (plain(t)[:, :, -NEWEST:] for t in (returned.key, returned.value))
        with torch.no_grad():
            ours = latents.expand(*newest)
        close = 1e-3 if key.dtype == torch.float32 else 5e-2
        self.absorbs = all(
            own.shape == given[:, :, -NEWEST:].shape
            and float((own - given[:, :, -NEWEST:]).norm() / given.norm().clamp_min(1e-6)) < close
            for own, given in zip(ours, (key, value), strict=True)
        )

    def attend_to_latents(
        self, own: Callable[..., Any], query: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """Attention over the latents of the cache in use. Where dropout, weights or biases are asked for, the
        latents are expanded for the model's ``own`` implementation."""
        current, latents = self.attachment.current, self.view.latents
        assert current is not None and latents is not None
        asked = unusual(options)
        parts = current.cache.latents(self.index, whole=asked)
        if asked:
            states = (part[:, None] for part in parts[0][:2])
            return own(self.view.module, query, *latents.expand(*states), mask, **options)
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        return latents.attend(query, parts, mask, scaling), None

    @property
    def implementation(self) -> str:
        """Of attention, as the forward pass found it when it began."""
        return self.named.now

    @property
    def passes_on(self) -> bool | None:
        """None where that was not seen yet."""
        if self.view.lends:
            return False
        name = self.named.now
        return self._passes_on.get(name) if name.startswith(PREFIX) else False

    # A method without arguments: torch 2.11 takes only constants for those of such a function.
    @torch.compiler.assume_constant_result
    def known_to_pass_on(self) -> bool:
        """Whether it was seen. No graph asks again."""
        return bool(self.passes_on)

    @property
    def why_whole(self) -> str:
        """For reports: what attends, and why, in a layer that does not pass on what its cache returns."""
        name = self.implementation
        if not name.startswith(PREFIX):
            return f"{name} (attention that is given whole keys and values)"
        family = type(self.attachment.view.model).__name__
        if self.absorbs:
            return "absorbed (attends to latents as they are)"
        return f"reference ({family} works with the states that a cache returns)"

    def warn_of_whole(self, codec: LayerCodec) -> None:
        """Say once that the layer's whole past, packed by ``codec``, is decoded for every token."""
        if not self.absorbs:
            warn_of_torch(unread(codec) or self.why_whole)

    def learn(self, passes_on: bool) -> None:
        self._passes_on[self.implementation] = passes_on

    def tracing(self) -> LayerPass:
        """What was seen of the layer so far while it is compiled."""
        if self.traced is None:
            self.traced = LayerPass()
        return self.traced

    def _seen(self) -> LayerPass | None:
        """Where to note what is seen; None where no compressed cache asks for it."""
        if torch.compiler.is_dynamo_compiling():
            return self.tracing() if self.named.now.startswith(PREFIX) else None
        current = self.attachment.current
        return None if current is None else current.at(self.index)

    def see_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        seen = self._seen()
        if seen is not None and args:
            seen.residual = args[0]

    def see_key(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen = self._seen()
        if seen is not None:
            channels = self.view.key_channels
            alone = isinstance(channels, slice) and output.shape[-1] == self.view.kv_width
            seen.raw_key = output if alone else output[..., channels]

    def see_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if torch.compiler.is_dynamo_compiling():
            seen = self._seen()
            if seen is not None:
                seen.x, seen.positions = x, kwargs.get("position_ids")
                seen.rope = _pair(kwargs.get("position_embeddings"))
            return
        current = self.attachment.current
        if current is None:
            return
        if self.view.outdated:
            raise ValueError(
                f"a projection of layer {self.index} was replaced after this cache was made, perhaps when"
                " adapters were added or merged: make a new one"
            )
        inputs = current.at(self.index)
        inputs.x = x
        if inputs.residual is None:
            inputs.residual = x
        if not self.lowest:
            return
        positions, axes = split_axes(kwargs.get("position_ids"), self.attachment.view.rope.axes)
        positions = current.positions if positions is None else positions
        axes = current.axes if axes is None else axes
        mask, rope = kwargs.get("attention_mask"), _pair(kwargs.get("position_embeddings"))
        current.cache.observe(LayerInputs(x, positions, mask, rope, axes, current.ids))


def _pair(rope: Any) -> Pair | None:
    """cos and sin, where a layer was given them."""
    if isinstance(rope, tuple) and len(rope) == 2 and all(isinstance(t, Tensor) for t in rope):
        return rope
    return None


def is_causal(like: str, module: nn.Module, query: Tensor, keys: Tensor, options: dict[str, Any]) -> bool:
    """Whether attention ``like`` this makes a causal mask where a layer gives it none."""
    asked = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    return like == "sdpa" and bool(causal) and query.shape[2] == keys.shape[2]


def unusual(options: dict[str, Any]) -> bool:
    """Whether the attention function is asked for more than scores, a mask and a softmax."""
    asked = options.get
    biased = asked("position_bias") is not None or asked("head_mask") is not None
    return biased or bool(asked("dropout") or asked("output_attentions"))

"""Finding the decoder of a model and what its attention layers are made of, or why it cannot be served."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .. import compat
from . import names
from .attention import Unsupported, rotate_whole_heads, view_attention
from .base import AttentionView, ModelView
from .layer_config import LayerConfig
from .rope import Rope
from .weights import offloading


# What is made in inference mode could not be used where gradients are recorded.
@torch.inference_mode(False)
def view_model(model: nn.Module) -> ModelView:
    """Find the attention layers of ``model`` and the reasons to skip some.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: the family cannot be served; the message names it and the reason.
    """
    family = type(model).__name__
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise TypeError(f"a transformers model is needed, not {family}")
    try:
        return _view(model)
    except Unsupported as reason:
        raise ValueError(f"{family} is not supported: {reason}") from None


def find_decoder(model: nn.Module) -> nn.Module | None:
    """The module of ``model`` that holds its decoder layers; None where it cannot be served."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        return None
    try:
        return _decoder(model)
    except Unsupported:
        return None


def _view(model: nn.Module) -> ModelView:
    decoder, family = _decoder(model), type(model).__name__
    config = compat.text_config(model)
    own = compat.default_layers(config)
    rope = _rope(decoder, config)
    views: list[AttentionView] = []
    skipped: dict[int, str] = {}
    windows: dict[int, int] = {}
    kinds = getattr(config, "layer_types", None) or ()
    found = {names.place_of(a): (layer, a) for layer, a in names.attentions(decoder)}
    if -1 in found or max(found, default=0) >= len(own):
        raise Unsupported("its layers do not say which part of a cache is theirs")
    places = {at: parts for at, parts in found.items() if compat.keeps_tokens(own[at])}
    for index, cache_layer in enumerate(own):
        if not compat.keeps_tokens(cache_layer):
            skipped[index] = compat.without_tokens(cache_layer)
        elif getattr(cache_layer, "is_sliding", False):
            window = getattr(cache_layer, "sliding_window", 0)
            skipped[index] = f"sliding window of {window} tokens"
            if "chunked_attention" not in kinds:  # whose cache says that it slides, too
                windows[index] = window
        elif type(cache_layer).__name__ != "DynamicLayer" and not compat.has_both(cache_layer):
            skipped[index] = f"{type(cache_layer).__name__} is not plain full attention"
    if not places:
        raise Unsupported("no decoder layers that attend were found")
    if places.keys() <= skipped.keys():
        raise Unsupported(f"it has no full-attention layer to compress ({skipped[min(places)]})")
    _check_offloading(decoder, {attention for _, attention in places.values()})
    for index, (layer, attention) in sorted(places.items()):
        kind = kinds[index] if index in skipped and index < len(kinds) else ""
        views.append(view_attention(family, layer, attention, config, rope, kind))
    embedding = _embedding(decoder)
    if embedding is not None:
        for view in views:
            view.vocabulary, view.embed = embedding.num_embeddings, embedding
    rotate_whole_heads([view for view in views if view.index not in skipped], rope)
    return ModelView(model, decoder, views, skipped, windows, rope)


# -- the decoder -----------------------------------------------------------------------------------


def _decoder(model: Any) -> nn.Module:
    """The module that holds the layers that generate text; of several towers, the one that the model's
    text configuration describes."""
    if model.config.is_encoder_decoder:
        raise Unsupported("it is an encoder-decoder model")
    if not compat.takes_caches(model):
        raise Unsupported("it takes caches of its own kind alone")
    root = model.get_decoder() if hasattr(model, "get_decoder") else model
    text = type(compat.text_config(model))
    if not any(_attends(module, text) for module in root.modules()):
        root = model  # some call another part of theirs a decoder
    found = {name: module for name, module in root.named_modules() if _attends(module, text)}
    if len(found) > 1:
        raise Unsupported(f"it has several decoders ({', '.join(found)})")
    if not found:
        raise Unsupported("no decoder layers that attend were found")
    return next(iter(found.values()))


def _attends(module: nn.Module, config: type) -> bool:
    """Whether ``module`` holds attention layers that are configured by a ``config``."""
    for _, attention in names.attentions(module):
        return type(getattr(attention, "config", None)) in (config, LayerConfig, type(None))
    return False


def _check_offloading(decoder: nn.Module, attentions: set[nn.Module]) -> None:
    """Refuse attention layers whose parts cannot run apart from each other."""
    for module in decoder.modules():
        whole = getattr(offloading(module), "place_submodules", False)
        if whole and not attentions.isdisjoint(module.modules()):
            raise Unsupported(
                f"accelerate offloads each {type(module).__name__} as a whole: leave it out of"
                " preload_module_classes"
            )


def _embedding(decoder: Any) -> nn.Embedding | None:
    """What gives the decoder a vector for each token id, where that is known."""
    try:
        found = decoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # how transformers says that it is not known
        return None
    return found if isinstance(found, nn.Embedding) else None


def _rope(decoder: nn.Module, config: Any) -> Rope:
    try:
        return Rope(names.module_of(decoder, names.ROTARY), config)
    except (KeyError, AttributeError):  # how an embedding per kind of layer says that it has none
        return Rope(None, config)

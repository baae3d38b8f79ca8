"""Finding the decoder of a model and what its attention layers are made of, or why it cannot be served."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .. import compat
from .base import AttentionView, ModelView
from .rope import Rope


def view_model(model: nn.Module) -> ModelView:
    """Find the attention layers of ``model`` and the reasons to skip some.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: the family cannot be served; the message names it and the reason.
    """
    family = type(model).__name__
    if not isinstance(model, nn.Module) or not isinstance(
        getattr(model, "config", None), PreTrainedConfig
    ):
        raise TypeError(f"a transformers model is needed, not {family}")
    try:
        return _view(model)
    except _Unsupported as reason:
        raise ValueError(f"{family} is not supported: {reason}") from None


def find_decoder(model: nn.Module) -> nn.Module | None:
    """The module of ``model`` that holds its decoder layers; None where it cannot be served."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        return None
    try:
        return _decoder(model)
    except _Unsupported:
        return None


class _Unsupported(Exception):
    """Says of a model, which is named by who catches it, why it cannot be served."""


def _view(model: nn.Module) -> ModelView:
    decoder = _decoder(model)
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise _Unsupported("it has no rotary position embedding")
    config = compat.text_config(model)
    if getattr(config, "num_kv_shared_layers", 0):
        raise _Unsupported("its upper layers attend to keys and values of layers below")
    own = compat.default_layers(config)
    views: list[AttentionView] = []
    skipped: dict[int, str] = {}
    windows: dict[int, int] = {}
    kinds = getattr(config, "layer_types", None) or ()
    for layer, cache_layer in zip(_layers(decoder), own, strict=False):
        view = _view_attention(layer, len(views))
        views.append(view)
        if getattr(cache_layer, "is_sliding", False):
            window = getattr(cache_layer, "sliding_window", 0)
            skipped[view.index] = f"sliding window of {window} tokens"
            if "chunked_attention" not in kinds:  # whose cache says that it slides, too
                windows[view.index] = window
        elif type(cache_layer).__name__ != "DynamicLayer":
            skipped[view.index] = f"{type(cache_layer).__name__} is not plain full attention"
        elif getattr(view.module, "use_rope", True) in (False, 0):
            skipped[view.index] = "no rotary embedding in this layer"
    if len(skipped) == len(views):
        reason = skipped[views[0].index]
        raise _Unsupported(f"it has no full-attention layer to compress ({reason})")
    first = next(chain(rotary.parameters(), rotary.buffers()), torch.empty(0))
    zero = torch.zeros(1, 1, dtype=torch.int, device=first.device)
    try:
        rope = Rope(rotary, config)
        turned = rope(first.new_empty(0), zero)[0]
    except (KeyError, AttributeError):  # how an embedding per kind of layer says that it has none
        raise _Unsupported("its full-attention layers have no rotary position embedding") from None
    for view in views:
        view.rotary_size = turned.shape[-1]
    return ModelView(model, decoder, views, skipped, windows, rope)


# -- the decoder -----------------------------------------------------------------------------------


def _decoder(model: Any) -> nn.Module:
    """The module that holds the layers that generate text; of several towers, the one that the model's
    text configuration describes."""
    if model.config.is_encoder_decoder:
        raise _Unsupported("it is an encoder-decoder model")
    root = model.get_decoder() if hasattr(model, "get_decoder") else model
    text = type(compat.text_config(model))
    found = {name: module for name, module in root.named_modules() if _attends(module, text)}
    if len(found) > 1:
        raise _Unsupported(f"it has several decoders ({', '.join(found)})")
    if any(hasattr(module, "kv_b_proj") for module in root.modules()):
        raise _Unsupported(
            "multi-head latent attention (MLA) keeps other states than keys and values"
        )
    if not found:
        raise _Unsupported("no decoder layers with self_attn were found")
    return next(iter(found.values()))


def _layers(decoder: nn.Module) -> Iterator[Any]:
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList):
        yield from layers


def _attends(module: nn.Module, config: type) -> bool:
    """Whether ``module`` holds attention layers that are configured by a ``config``."""
    for layer in _layers(module):
        attention = getattr(layer, "self_attn", None)
        if attention is not None and hasattr(attention, "layer_idx"):
            return type(getattr(attention, "config", None)) in (config, type(None))
    return False


# -- an attention layer ----------------------------------------------------------------------------


def _view_attention(layer: Any, index: int) -> AttentionView:
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        cross = hasattr(layer, "cross_attn")
        raise _Unsupported(
            f"layer {index} is {'cross-attention' if cross else 'not attention'}"
            f" ({type(layer).__name__})"
        )
    size = getattr(attention, "head_dim", None)
    if size is None or not hasattr(attention, "config"):
        raise _Unsupported(
            f"the attention of layer {index} is of another kind ({type(attention).__name__})"
        )
    groups = _groups(attention)
    key, value, key_slice, value_slice = _projections(attention, size, groups)
    key_norm = getattr(attention, "k_norm", None)
    norm_size = getattr(getattr(key_norm, "weight", None), "numel", lambda: size)()
    if norm_size != size:
        raise _Unsupported("its key norm spans heads")
    kv_heads = (key_slice.stop - key_slice.start) // size
    return AttentionView(
        index=attention.layer_idx,
        module=attention,
        norm=getattr(layer, "input_layernorm", None),
        hidden=key.in_features,
        kv_heads=kv_heads,
        query_heads=kv_heads * groups,
        head_size=size,
        key_module=key,
        key_slice=key_slice,
        value_module=value,
        value_slice=value_slice,
        key_norm=key_norm,
    )


def _groups(attention: Any) -> int:
    """Query heads of a key/value head."""
    own = getattr(attention, "num_key_value_groups", None)
    if own:
        return int(own)
    heads = attention.config.num_attention_heads
    return int(heads // (getattr(attention.config, "num_key_value_heads", None) or heads))


def _projections(attention: Any, size: int, groups: int) -> tuple[Any, Any, slice, slice]:
    """The linear layers that give keys and values of heads of ``size``, and their part of each output."""
    fused = getattr(attention, "qkv_proj", None)
    if fused is not None:
        rows = _rows(fused)
        width = rows // (groups + 2)
        if rows % (groups + 2) or width % size:
            raise _Unsupported("its qkv_proj gives more than queries, keys and values")
        start = groups * width
        return fused, fused, slice(start, start + width), slice(start + width, rows)
    key, value = (getattr(attention, name, None) for name in ("k_proj", "v_proj"))
    if key is None or value is None:
        raise _Unsupported("it has no k_proj and v_proj, nor a fused qkv_proj")
    rows, value_rows = _rows(key), _rows(value)
    if rows % size:
        raise _Unsupported(f"its k_proj gives {rows} channels, not heads of {size}")
    if value_rows != rows:
        raise _Unsupported(
            f"its value heads have another size than its key heads ({value_rows} channels to {rows})"
        )
    return key, value, slice(0, rows), slice(0, rows)


def _rows(module: Any) -> int:
    """Channels that a linear layer gives."""
    if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
        raise _Unsupported(f"its projections are of another kind ({type(module).__name__})")
    if hasattr(getattr(module, "weight", None), "to_local"):
        raise _Unsupported("its linear layers are sharded over devices")
    return int(module.out_features)

"""The only file that knows transformers versions.

Supported from 5.8 on. What changed since: ``crop`` takes a final length up to 5.13 and a (negative)
number of tokens to remove from 5.18 on; ``get_max_cache_shape`` became ``get_max_length`` in 5.13; the
rotary embeddings of Qwen2-VL and Qwen2.5-VL gave the angles of three axes, and layers chose among them;
``past_key_values`` became ``cache`` in 5.24, which warns of the old name.
"""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VERSION = Version(transformers.__version__)
CROP_ZERO_EMPTIES = Version("5.18") > VERSION
"""Whether ``crop(0)`` means "down to nothing" (old) rather than "remove nothing"."""

CACHE = "cache" if Version("5.24") <= VERSION else "past_key_values"
"""As what models and ``generate`` are given a cache."""


def takes_caches(model: nn.Module) -> bool:
    """Whether a model takes transformers' usual caches; a few have one of their own."""
    asked = getattr(model, "_supports_default_dynamic_cache", None)
    return asked is None or bool(asked())


def uncompiled(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` wrapped; any other model itself."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


def cast(model: Any, dtype: torch.dtype) -> None:
    """Have a model's weights in ``dtype``, but for what loading it so would leave in float32: numbers that
    its class keeps so, and those that no file has, such as the frequencies of RoPE.

    ``model``: of transformers.
    """
    kept = "|".join(part.replace("*", ".*") for part in model._get_dtype_plan(dtype))
    held = [
        (place, name, tensor, tensor.data)
        for path, module in model.named_modules()
        for place in (module._parameters, module._buffers)
        for name, tensor in place.items()
        if tensor is not None
        and (name in module._non_persistent_buffers_set or (kept and re.search(kept, f"{path}.{name}")))
    ]
    model.to(dtype)
    for place, name, tensor, data in held:
        tensor.data = data
        place[name] = tensor


def has_prefix(model: nn.Module) -> bool:
    """Whether peft is to give each call of ``model`` a cache of its own, with a prefix in it: of a model of
    peft's, and of the one inside while ``generate`` of peft's runs."""
    asked = getattr(model, "prepare_inputs_for_generation", None)
    tuned = getattr(getattr(asked, "__self__", None), "active_peft_config", None)
    return getattr(tuned, "peft_type", None) in ("PREFIX_TUNING", "CARTRIDGE")


def text_config(model: nn.Module) -> PreTrainedConfig:
    """The decoder's own configuration, also of a model with several modalities."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    return config


def depth_of(model: nn.Module) -> int:
    """How many decoder layers a forward pass of a model runs, from the lowest on."""
    layers: int = text_config(model).num_hidden_layers
    return layers


def default_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that transformers itself would use, one per decoder layer."""
    return list(default_cache(config).layers)


def default_cache(config: PreTrainedConfig) -> DynamicCache:
    """The cache that transformers itself would use."""
    return DynamicCache(config=config)


def keeps_tokens(layer: Any) -> bool:
    """Whether a cache layer of transformers holds states of every token, rather than one of all."""
    return isinstance(layer, DynamicLayer)


STATES_ARE_ASKED_OF_CACHES = hasattr(transformers.Cache, "get_conv_state")
"""Whether models ask a cache for states of linear attention; earlier they looked for them in its layers."""


def has_both(layer: Any) -> bool:
    """Whether a cache layer of transformers holds a state of linear attention beside keys and values."""
    return type(layer).__name__ == "LinearAttentionAndFullAttentionLayer"


def state_of(layer: Any) -> Any:
    """An empty cache layer for the state alone of one that `has_both`."""
    from transformers.cache_utils import LinearAttentionLayer  # 5.8 has no such models

    return LinearAttentionLayer(number_of_states=layer.number_of_states)


def states_of(layer: Any) -> dict[str, Tensor] | None:
    """The states of linear attention in a cache layer that has nothing else, by kind and number
    (``"conv.0"``); None of another layer, or of one that also keeps what left its states."""
    plain = type(layer).__name__ == "LinearAttentionLayer" and not layer.record_past
    if not plain or not isinstance(layer.conv_states, dict):  # before 5.13 there was one of each
        return None
    kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    states = ((f"{kind}.{i}", s) for kind, each in kinds.items() for i, s in each.items())
    return {name: state for name, state in states if state is not None}


def held_by(layer: Any) -> list[Tensor]:
    """The keys and values of a cache layer of transformers, and its states."""
    found = [getattr(layer, name, None) for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, Tensor)] + states_in(layer)


CONV_STATES, RECURRENT_STATES = "conv_states", "recurrent_states"
"""What convolutions look back at, and what linear attention and Mamba add up."""


def states_in(layer: Any, *kinds: str) -> list[Tensor]:
    """The states of linear attention and convolutions of a cache layer of transformers, or of one of these
    ``kinds``."""
    found: list[Any] = []
    for name in kinds or (CONV_STATES, RECURRENT_STATES):
        states = getattr(layer, name, None)
        found += states.values() if isinstance(states, dict) else [states]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def has_state(layer: Any) -> bool:
    """Whether a cache layer of transformers holds a state of one size, alone or beside keys and values."""
    return hasattr(layer, CONV_STATES)


def compute_experts_together(model: nn.Module) -> None:
    """Have a model without weights compute experts in a way that torch's meta device can do."""
    choose = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("batched_mm")


def put_states(layer: Any, states: dict[str, Tensor]) -> None:
    """Give an empty cache layer the `states_of` another."""
    for name, state in states.items():
        kind, _, number = name.partition(".")
        if kind == "conv":
            layer.lazy_initialization(conv_states=state, state_idx=int(number))
            layer.conv_states[int(number)].copy_(state)
            layer.has_previous_state[int(number)] = True
        else:
            layer.update_recurrent_state(state, state_idx=int(number))


def is_empty(layer: Any) -> bool:
    """Whether a cache layer stands for a layer that caches nothing."""
    return type(layer).__name__ == "DummyLayer"


def without_tokens(layer: Any) -> str:
    """What a cache layer is that does not keep tokens."""
    if is_empty(layer):
        return "no keys and values of its own"
    return "a state of one size, not keys and values"


def asks_interface(attention: nn.Module) -> bool:
    """Whether an attention layer calls the attention function that its configuration names, rather than
    attend by itself."""
    methods = (m for kind in type(attention).__mro__ for m in vars(kind).values() if callable(m))
    codes = (getattr(inspect.unwrap(method), "__code__", None) for method in methods)
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes if code is not None)


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that ``name`` stands for in the file that defines ``module``."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def register_attention(name: str, like: str, function: Callable[..., Any]) -> None:
    """Register ``function`` under ``name`` with the masks of the implementation ``like``."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[like])


AXES = 3
"""Of positions of images: time, height and width. Few models have others."""


class RotaryForm(NamedTuple):
    """What a model's rotary embedding is called with, besides states and positions."""

    more: dict[str, str]
    """Models with two kinds of RoPE name the layer type."""
    axes: int
    """How many axes positions may have."""
    sections: list[int]
    """Channels of each axis in turn, where angles of all axes come back and layers choose; otherwise none."""


def rotary_form(rotary: nn.Module) -> RotaryForm:
    """How a rotary embedding is called. Asked once: reading a signature takes longer than a call."""
    named = "layer_type" in inspect.signature(rotary.forward).parameters
    parameters = getattr(getattr(rotary, "config", None), "rope_parameters", None) or {}
    own = getattr(rotary, "mrope_section", None)
    sections = list(own or parameters.get("mrope_section") or ())
    chosen = bool(sections) and not hasattr(rotary, "mrope_section")
    more = {"layer_type": "full_attention"} if named else {}
    return RotaryForm(more, len(sections) or AXES, 2 * sections if chosen else [])


def rotation(attention: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The function by which an attention layer applies RoPE to queries and keys ``[B, H, T, D]``; None
    where its module has none of the usual name."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None or next(iter(inspect.signature(apply).parameters)) != "x":
        return apply

    def both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply(query, cos, sin), apply(key, cos, sin)  # Gemma 4's takes one of them

    return both


def angles(rotary: nn.Module, form: RotaryForm, like: Tensor, positions: Tensor, kind: str = "") -> Any:
    """What a rotary embedding gives for ``positions`` ``[B, T]`` of text or ``[N, B, T]`` of several axes, in
    the dtype of ``like``: most give cos and sin. ``kind``: of the layer, where it is not one of full
    attention."""
    if kind and form.more:
        form = form._replace(more={"layer_type": kind})
    if form.sections:
        positions = positions.expand(form.axes, -1, -1)
    return rotary(like, positions, **form.more)


def chosen(form: RotaryForm, table: Any) -> Any:
    """Of angles of all axes, cos and sin ``[N, B, T, R]``, those that layers choose, ``[B, T, R]`` each. A
    table of another form is given back."""
    if not form.sections or not isinstance(table, tuple) or table[0].dim() != 4:
        return table
    parts = (enumerate(angles.split(form.sections, -1)) for angles in table)
    return tuple(torch.cat([part[i % form.axes] for i, part in each], -1) for each in parts)

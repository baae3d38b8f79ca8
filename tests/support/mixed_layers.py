"""Caches whose layers are coded together, and how much of other caches they hold."""

from typing import Any

import torch
from torch import Tensor

from support.caches import make_cache
from support.models import prompt, tiny
from xquant import KVCache


def filled(model: Any, spec: str, *parts: int) -> KVCache:
    """A cache of two sequences that came in passes of ``parts`` tokens."""
    cache = make_cache(model, spec)
    with torch.inference_mode():
        for part in prompt(2, sum(parts)).split(parts, 1):
            model(part, past_key_values=cache, use_cache=True)
    return cache


def states(cache: KVCache) -> list[Tensor]:
    """Keys and values of all layers, as attention reads them."""
    return [state for layer in cache.compressed for state in layer.states()]


def error(cache: KVCache, exact: KVCache) -> float:
    """What a cache loses of another's states, relative to them."""
    pairs = zip(states(cache), states(exact), strict=True)
    return sum(float((found - true).norm() / true.norm()) for found, true in pairs)


def recalls_as_converted(spec: str) -> None:
    """Check that a step attends to what a conversion holds, however tokens came: it is read within a pass or
    outside of one, and in a pass that seals or one that does not."""
    model = tiny("llama")
    cache, again = filled(model, spec, 40, 40, 16), filled(model, spec, 40, 40, 16)
    with torch.inference_mode():
        logits = model(prompt(2, 1, seed=3), past_key_values=again).logits
        copied = cache.converted("full:group=16")
        expected = model(prompt(2, 1, seed=3), past_key_values=copied).logits
    assert (logits - expected).norm() < 1e-3 * expected.norm()


def alike() -> Any:
    """A model whose layers are the same, so that their keys and values tell much of each other's."""
    model = tiny("llama")
    first, *others = model.model.layers
    with torch.no_grad():
        for parameter in (*first.self_attn.o_proj.parameters(), *first.mlp.down_proj.parameters()):
            parameter.mul_(0.1)
        for layer in others:
            layer.load_state_dict(first.state_dict())
    return model

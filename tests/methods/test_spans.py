"""Layers of `tc-cl` that are coded together: the same bytes as apart, read in every way that a cache is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from calibrated import make_cache
from models import prompt, tiny
from saving import loaded
from xquant import KVCache
from xquant.calibrators.transform import dealt_out

APART, TOGETHER = (
    "tc-cl-2bit:group=16,embedding=false",
    "tc-cl-2bit:group=16,embedding=false,span=3",
)


def filled(model: Any, spec: str, *parts: int) -> KVCache:
    cache = make_cache(model, spec)
    with torch.inference_mode():
        for part in prompt(2, sum(parts)).split(parts, 1):
            model(part, past_key_values=cache, use_cache=True)
    return cache


def states(cache: KVCache) -> list[torch.Tensor]:
    return [state for layer in cache.compressed for state in layer.states()]


def error(cache: KVCache, exact: KVCache) -> float:
    pairs = zip(states(cache), states(exact), strict=True)
    return sum(float((found - true).norm() / true.norm()) for found, true in pairs)


def test_layers_get_loud_and_quiet_channels_alike() -> None:
    places = dealt_out([3, 3, 2])
    assert sorted(torch.cat(places).tolist()) == list(range(8))
    assert [len(own) for own in places] == [3, 3, 2]
    assert all(int(own[0]) < 3 for own in places)


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


def test_together_they_take_the_same_bytes_and_lose_less() -> None:
    model = alike()
    full = filled(model, "full:group=16", 96)
    spec = "tc-cl-1bit:group=16,embedding=false,reach=1"
    apart, together = filled(model, spec, 96), filled(model, spec + ",span=3", 96)
    assert sum(layer.stream.nbytes for layer in together.compressed) == sum(
        layer.stream.nbytes for layer in apart.compressed
    )
    assert error(together, full) < error(apart, full)


@pytest.mark.parametrize("reach", [1, 2, 5])
@pytest.mark.parametrize("span", [2, 3, 8])
def test_what_is_recalled_does_not_depend_on_how_tokens_came(span: int, reach: int) -> None:
    """Read within a pass or outside of one, and in a pass that seals or one that does not."""
    model = tiny("llama")
    spec = f"tc-cl-3bit:group=16,span={span},reach={reach}"
    cache = filled(model, spec, 40, 40, 16)
    again = filled(model, spec, 40, 40, 16)
    with torch.inference_mode():
        logits = model(prompt(2, 1, seed=3), past_key_values=again).logits
        copied = cache.converted("full:group=16")
        expected = model(prompt(2, 1, seed=3), past_key_values=copied).logits
    assert (logits - expected).norm() < 1e-3 * expected.norm()


def test_a_file_and_another_method_hold_the_same(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = filled(model, TOGETHER, 64)
    for found, kept in zip(states(loaded(cache, tmp_path / "c")), states(cache), strict=True):
        assert torch.equal(found, kept)
    other = cache.converted("full:group=16")
    for found, kept in zip(states(other), states(cache), strict=True):
        assert torch.allclose(found, kept, atol=1e-4)


def test_tokens_cannot_read_themselves_before_the_layers_above_are_known() -> None:
    with pytest.raises(ValueError, match="codes layers together"):
        make_cache(tiny("llama"), TOGETHER, "store")

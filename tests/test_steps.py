"""Compiled decode steps: the tokens of those that are not, and prompts as they were."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from support.models import pickled, prompt, tiny
from xquant import KVCache, StaticKVCache, compile_steps, detach, pack_weights, uncompile_steps

SPEC = "kivi-4bit:group=32"
CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda model: KVCache(model, SPEC),
    "static": lambda model: StaticKVCache(model, SPEC, room=128),
    "full": lambda model: DynamicCache(config=model.config),
}


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they are: to have them compiled takes minutes."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(_compile_eagerly, torch.compile))
    yield
    torch._dynamo.reset()


def _compile_eagerly(compile_: Callable[..., Any], function: Any, options: dict[str, Any]) -> Any:
    assert not options.pop("size_asserts")
    return compile_(function, backend="eager", options=options)


def tokens(model: Any, cache: Any, length: int = 40) -> torch.Tensor:
    ids = prompt(2, length)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    return model.generate(ids, past_key_values=cache, **given)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", CACHES)
def test_steps_are_compiled_and_prompts_are_not(kind: str) -> None:
    model = tiny("llama")
    want = tokens(model, CACHES[kind](model))
    compile_steps(model)
    with torch.no_grad():
        model(prompt(2, 30), past_key_values=CACHES[kind](model))
    assert not counters["frames"]
    assert torch.equal(tokens(model, CACHES[kind](model)), want)
    compiled = counters["frames"]["ok"]
    assert compiled
    assert torch.equal(tokens(model, CACHES[kind](model)), want)
    assert counters["frames"]["ok"] == compiled, "a second text compiles nothing anew"
    uncompile_steps(model)
    assert torch.equal(tokens(model, CACHES[kind](model)), want)


@pytest.mark.long
@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copy_has_steps_of_its_own(way: Callable[[Any], Any]) -> None:
    model = tiny("llama")
    want = tokens(model, CACHES["static"](model))
    compile_steps(model)
    other = way(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(tokens(other, CACHES["static"](other)), want)
    assert counters["frames"]["ok"]


def test_a_step_that_records_gradients_runs_as_before() -> None:
    model, cached = tiny("llama"), CACHES["growing"]
    want, cache = [], cached(model)
    for length in (40, 1):
        want.append(model(prompt(2, length), past_key_values=cache).logits)
    compile_steps(model)
    cache = cached(model)
    for length, logits in zip((40, 1), want, strict=True):
        assert torch.equal(model(prompt(2, length), past_key_values=cache).logits, logits)
    assert not counters["frames"]


def test_what_cannot_be_compiled_is_refused() -> None:
    model = tiny("llama")
    model.model.forward = model.model.forward
    with pytest.raises(ValueError, match="the decoder's forward was replaced"):
        compile_steps(model)
    with pytest.raises(TypeError):
        compile_steps(torch.nn.Linear(2, 2))


def test_what_layers_are_made_of_is_looked_at_anew_when_asked() -> None:
    model = tiny("llama", hidden_size=64)
    compile_steps(model)
    tokens(model, CACHES["static"](model))
    pack_weights(model, bits=4)
    compile_steps(model)
    found = tokens(model, CACHES["static"](model))
    compiled = counters["frames"]["ok"]
    uncompile_steps(model)
    assert torch.equal(tokens(model, CACHES["static"](model)), found)
    assert counters["frames"]["ok"] == compiled


@pytest.mark.long
def test_caches_come_and_go() -> None:
    """Hooks are seen, whatever is not looked at."""
    model = tiny("llama")
    want = tokens(model, CACHES["full"](model))
    compile_steps(model)
    for kind in ("full", "static", "growing", "full"):
        tokens(model, CACHES[kind](model))
    detach(model)
    assert torch.equal(tokens(model, CACHES["full"](model)), want)
    first = tokens(model, CACHES["static"](model))
    uncompile_steps(model)
    assert torch.equal(tokens(model, CACHES["static"](model)), first)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["static", "full"])
def test_hooks_within_layers_are_seen_when_they_come_and_go(kind: str) -> None:
    model = tiny("llama", num_hidden_layers=2)
    want = tokens(model, CACHES[kind](model))
    compile_steps(model)
    assert torch.equal(tokens(model, CACHES[kind](model)), want)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: -output)
    assert not torch.equal(tokens(model, CACHES[kind](model)), want)
    handle.remove()
    compiled = counters["frames"]["ok"]
    assert torch.equal(tokens(model, CACHES[kind](model)), want)
    assert counters["frames"]["ok"] == compiled, "the first graph is there still"

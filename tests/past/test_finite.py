"""NaN and infinity where the host does not ask at once: found later, and never in codes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.models import prompt, tiny
from xquant import KVCache
from xquant.past import finite

SPEC = "kivi-4bit:group=32,sink=1"
LATER = "layer 3: an earlier forward pass left them there, from token {0} on; crop the cache to {0} tokens"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are taken to be on a GPU."""
    monkeypatch.setattr(finite, "asked_at_once", lambda device: False)


@contextmanager
def poison(model: Any, layer: int = 2, value: float = torch.nan) -> Iterator[None]:
    """One number that is not finite above ``layer``."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        output[-1, -1, 0] = value
        return output

    handle = model.model.layers[layer].mlp.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def run(model: Any, cache: KVCache, start: int, stop: int) -> Tensor:
    """Tokens ``start`` to ``stop`` of a text in one forward pass."""
    ids = prompt(2, 100)[:, start:stop]
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return logits


def filled(model: Any, tokens: int) -> KVCache:
    cache = KVCache(model, SPEC, kernel="reference")
    run(model, cache, 0, tokens)
    return cache


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("stop", [60, 64, 100])  # nothing is sealed, a block, several
def test_a_prefill_is_refused_and_leaves_the_cache_as_it_was(stop: int, value: float) -> None:
    model = tiny("llama")
    cache, want = filled(model, 40), run(model, filled(model, 40), 40, stop)
    with poison(model, value=value), pytest.raises(ValueError, match="left as it was before this"):
        run(model, cache, 40, stop)
    assert {layer.get_seq_length() for layer in cache.compressed} == {40}
    assert cache.index.length == 40
    assert torch.equal(run(model, cache, 40, stop)[:, :20], want[:, :20])


def test_a_decode_step_is_found_when_its_block_would_be_sealed() -> None:
    model = tiny("llama")
    cache, good = filled(model, 40), filled(model, 40)
    for token in range(40, 63):
        if token == 50:
            with poison(model):
                run(model, cache, token, token + 1)
        else:
            run(model, cache, token, token + 1)
    for _ in range(2):  # nor does trying again get past it
        with pytest.raises(ValueError, match=LATER.format(50)):
            run(model, cache, 63, 64)
        assert {layer.get_seq_length() for layer in cache.compressed} == {63}
        assert {layer.stream.tokens for layer in cache.compressed} == {32}
    cache.crop(50)
    for token in range(40, 50):
        run(model, good, token, token + 1)
    assert torch.equal(run(model, cache, 50, 51), run(model, good, 50, 51))


def test_a_prefill_finds_what_a_decode_step_left() -> None:
    model = tiny("llama")
    cache = filled(model, 40)
    with poison(model):
        run(model, cache, 40, 41)
    with pytest.raises(ValueError, match=LATER.format(40)):
        run(model, cache, 41, 60)
    assert cache.index.length == 41


def test_where_nothing_good_came_before_only_a_reset_helps() -> None:
    model = tiny("llama")
    with poison(model):
        cache = filled(model, 1)
    with pytest.raises(ValueError, match="from token 0 on; reset the cache"):
        run(model, cache, 1, 40)
    cache.reset()
    assert run(model, cache, 0, 40).isfinite().all()


def test_what_reads_the_store_is_asked_at_once() -> None:
    model = tiny("llama")
    cache = KVCache(model, SPEC, attend="store")
    run(model, cache, 0, 40)
    with poison(model), pytest.raises(ValueError, match="left as it was before this"):
        run(model, cache, 40, 41)
    assert cache.index.length == 40


def test_rows_whose_sum_is_too_large_are_finite() -> None:
    finite.check_rows(torch.full((1, 4, 8), 3e38), layer=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_found(value: float) -> None:
    rows = torch.full((1, 4, 8), -3e38)
    rows[0, 2, 5] = value
    with pytest.raises(ValueError, match="layer 7"):
        finite.check_rows(rows, layer=7)

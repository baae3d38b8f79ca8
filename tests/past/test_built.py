"""Work that a layer does once: the keys and values of its tail, and what it predicts of its tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import make_cache
from support.generation import remove
from support.models import prompt, tiny
from xquant import KVCache

SPECS = [
    "xquant-4bit:group=16,form=mha",
    "xquant-4bit:group=16,form=gqa",
    "xquant-cl-4bit:group=16,sink=2",
]


def check(cache: KVCache) -> None:
    """Keys and values are those that follow from the tail."""
    for layer in cache.compressed:
        assert layer.tail is not None
        found, wanted = layer.built.of(layer.tail), layer.codec.exact(layer.tail)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_tail_is_not_projected_again(spec: str, monkeypatch: Any) -> None:
    model = tiny("llama")
    cache, ids = make_cache(model, spec), prompt(2, 60)
    model(ids[:, :20], past_key_values=cache)
    projected: list[int] = []
    for layer in cache.compressed:

        def exact(rows: Tensor, own: Any = layer.codec.exact) -> Any:
            projected.append(rows.shape[1])
            return own(rows)

        monkeypatch.setattr(layer.codec, "exact", exact)
    for at in range(20, 40):  # a block is sealed on the way
        model(ids[:, at : at + 1], past_key_values=cache)
    assert max(projected, default=0) <= cache.method.sink
    monkeypatch.undo()
    check(cache)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_tail_that_changes_is_followed(spec: str) -> None:
    model = tiny("llama")
    cache, ids = make_cache(model, spec), prompt(2, 60)
    model(ids[:, :28], past_key_values=cache)
    remove(cache, 5)
    check(cache)
    model(ids[:, 23:26], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    check(cache)
    before = cache.snapshot()
    model(ids[[1, 0, 1], 26:40], past_key_values=cache)
    check(cache)
    cache.restore(before)
    check(cache)
    cache.reset()
    assert all(layer.tail_nbytes == 0 for layer in cache.compressed)


@torch.no_grad()
def test_what_is_sealed_is_predicted_once(monkeypatch: Any) -> None:
    model = tiny("llama")
    cache = make_cache(model, "tc-cl-2bit:group=16")
    predicted: dict[int, int] = {}
    for number, layer in enumerate(cache.compressed):

        def count(
            below: Tensor | None,
            embedded: Tensor,
            sealing: bool,
            number: int = number,
            own: Any = layer.codec.predicted,
        ) -> Any:
            predicted[number] = predicted.get(number, 0) + embedded.shape[1]
            return own(below, embedded, sealing)

        monkeypatch.setattr(layer.codec, "predicted", count)
    model(prompt(1, 48), past_key_values=cache)
    assert predicted == dict.fromkeys(range(len(cache.compressed)), 48)

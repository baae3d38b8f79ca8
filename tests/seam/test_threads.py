"""Threads that share a model: what a forward pass knows belongs to it alone."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from support.models import prompt, tiny
from xquant import KVCache, attach

ROUNDS = int(os.environ.get("XQUANT_ROUNDS", 6))
"""Of each pair of threads; 200 by hand."""


@pytest.fixture(autouse=True)
def busy() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def generate(model: Any, make: Callable[[], Any], seed: int) -> Tensor:
    ids = prompt(1, 20 + 7 * seed, seed=seed + 1)
    tokens: Tensor = model.generate(ids, past_key_values=make(), max_new_tokens=12, do_sample=False)
    return tokens


def at_once(jobs: list[Callable[[], Tensor]]) -> list[Tensor]:
    """What each gives when all run at the same time."""
    found: list[Any] = [None] * len(jobs)

    def work(number: int) -> None:
        try:
            found[number] = jobs[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32", "xquant-cl-3bit:group=8"])
def test_two_threads_with_a_cache_each(spec: str, kernel: str) -> None:
    model = tiny("llama", head_dim=32)

    def make() -> KVCache:
        return KVCache(model, spec, kernel=kernel)

    want = [generate(model, make, seed) for seed in (0, 1)]
    for _ in range(ROUNDS):
        got = at_once([lambda: generate(model, make, 0), lambda: generate(model, make, 1)])
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32"])
def test_another_cache_beside_ours(spec: str) -> None:
    model = tiny("llama", head_dim=32)

    def ours() -> KVCache:
        return KVCache(model, spec)

    def theirs() -> DynamicCache:
        return DynamicCache(config=model.config)

    want = [generate(model, ours, 0), generate(model, theirs, 1)]
    for _ in range(ROUNDS):
        got = at_once([lambda: generate(model, ours, 0), lambda: generate(model, theirs, 1)])
        assert all(map(torch.equal, got, want))


def test_threads_attach_a_model_once() -> None:
    for _ in range(ROUNDS):
        model = tiny("llama")
        found = at_once([partial(attach, model)] * 4)
        assert len(set(map(id, found))) == 1
        caches = at_once([partial(KVCache, model, "xquant-4bit")] * 3)
        assert len({id(cache.stack.codecs) for cache in caches}) == 1

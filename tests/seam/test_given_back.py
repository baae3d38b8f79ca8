"""Memory is given back: nothing but what a caller holds keeps a model or a cache alive, in any form."""

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from support.models import prompt, tiny
from xquant import KVCache, PrefixStore, StaticKVCache, compress, compressed, decompress, detach

SPEC = "kivi-4bit:group=32"


def filled(model: Any) -> Any:
    return run(model, KVCache(model, SPEC))


@torch.no_grad()
def run(model: Any, cache: Any) -> Any:
    """``cache`` after a prompt and a step."""
    for ids in (prompt(1, 70), prompt(1, 1)):
        model(ids, past_key_values=cache)
    return cache


def loaded(model: Any, folder: Path) -> Any:
    filled(model).save(folder / "cache")
    return run(model, KVCache.load(model, folder / "cache"))


@torch.no_grad()
def from_a_store(model: Any, folder: Path) -> Any:
    store = PrefixStore(folder / "store", model, SPEC)
    ids, cache = prompt(1, 140), KVCache(model, SPEC)
    model(ids, past_key_values=cache)
    store.put(cache, ids)
    return run(model, store.get(ids))


def of_a_block(model: Any, folder: Path) -> Any:
    with compressed(model, SPEC):
        out = model.generate(prompt(1, 40), max_new_tokens=3, return_dict_in_generate=True)
        return out.past_key_values


def of_compress(model: Any, folder: Path) -> Any:
    compress(model, SPEC)
    cache = model(prompt(1, 40), use_cache=True).past_key_values
    decompress(model)
    return cache


def compiled(form: Callable[[Any], Any]) -> Callable[[Any, Path], Any]:
    return lambda model, _: run(torch.compile(model, backend="eager"), form(model))


def interrupted(model: Any, folder: Path) -> Any:
    cache = filled(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, cache)
    handle.remove()
    return cache


def static(model: Any) -> Any:
    return StaticKVCache(model, SPEC, room=160)


FORMS: dict[str, Callable[[Any, Path], Any]] = {
    "growing": lambda model, _: filled(model),
    "static": lambda model, _: run(model, static(model)),
    "copy": lambda model, _: run(model, copy.deepcopy(filled(model))),
    "copy of a static one": lambda model, _: run(model, copy.deepcopy(run(model, static(model)))),
    "loaded": loaded,
    "converted": lambda model, _: run(model, filled(model).converted("int8:group=32")),
    "from a store": from_a_store,
    "of a block": of_a_block,
    "of compress": of_compress,
    "compiled": compiled(lambda model: KVCache(model, SPEC)),
    "compiled and static": compiled(static),
    "interrupted": interrupted,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_and_its_caches_end_with_their_last_holder(form: str, tmp_path: Path) -> None:
    """The thread that ran them goes on, and runs nothing else."""
    model = tiny("llama", num_hidden_layers=2)
    with ThreadPoolExecutor(1) as thread:
        cache = thread.submit(FORMS[form], model, tmp_path).result()
        seen = ref(cache)
        del cache
        gc.collect()
        assert seen() is None  # the model goes on
        detach(model)
        cache = thread.submit(FORMS[form], model, tmp_path).result()
        both = ref(model), ref(cache)
        del model, cache
        gc.collect()
        assert [each() for each in both] == [None, None]


def test_a_model_that_shares_the_decoder_of_another() -> None:
    model = tiny("llama", num_hidden_layers=2)
    filled(model)
    other = type(model)(model.config)
    other.model = model.model
    for _ in range(2):
        filled(other)
    seen = ref(other)
    del other
    gc.collect()
    assert seen() is None
    filled(model)

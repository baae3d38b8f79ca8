"""KVCache with a budget: tokens stay in full as long as they fit, the newest longest."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from support.caches import calibration
from support.models import prompt, tiny
from xquant import KVCache, compressed, parse_method

SPECS = [
    "kivi-2bit:group=8,sink=2",
    "int8:group=16",
    "tc-cl-1.5bit:group=16,sink=2",
    "crosslayer:group=8,tail=0,merge=floor,gamma=0.7,km=2,vm=0,sink=2",
    "xquant-2bit:group=8,form=gqa,tail=5",
    "nf4:group=8",
]


def budgeted(model: Any, spec: str, budget: int | str) -> KVCache:
    return KVCache(model, spec, calibration=calibration(model, parse_method(spec)), budget=budget)


@torch.inference_mode()
def read(cache: Any, model: Any, ids: Tensor, **given: Any) -> Tensor:
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True, **given).logits
    return logits


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_takes_no_more_than_its_budget(family: str, spec: str) -> None:
    """In prompts and steps; and what it holds is what the same tail would hold."""
    model, ids = tiny(family), prompt(2, 300)
    full = budgeted(model, spec, "1GB")
    read(full, model, ids[:, :100])
    assert not full.compressed[0].stream.tokens
    budget = full.nbytes
    cache = budgeted(model, spec, budget)
    start, exact = 0, []
    for count in (40, 1, 30, 29, *[1] * 30, 70, *[1] * 9):
        read(cache, model, ids[:, start : start + count])
        start += count
        assert cache.nbytes <= budget
        assert cache.compressed[0].tail is not None
        exact.append(cache.compressed[0].tail.shape[1])
        assert start <= 100 or cache.compressed[0].stream.tokens > 0
    block, row = cache.method.group, full.report().tail_bytes / 100
    assert exact[3] >= 100 - block and block <= exact[-1] < 100
    assert cache.nbytes > budget - 2 * block * row - 2000  # and does not compress what would fit


def test_tokens_that_fit_are_read_exactly() -> None:
    model, ids = tiny("llama"), prompt(1, 200)
    exact, cache = DynamicCache(config=model.config), budgeted(model, "kivi-2bit:group=8", "1GB")
    for part in ids.split([150, 1, 49], 1):
        torch.testing.assert_close(read(cache, model, part), read(exact, model, part), atol=1e-4, rtol=1e-4)
    assert cache.report().tail_bytes and not cache.compressed[0].stream.tokens


def test_what_no_longer_fits_is_the_oldest() -> None:
    """A cache that is over its budget holds what one with a tail of that length holds."""
    model, ids = tiny("llama"), prompt(1, 260)
    cache = budgeted(model, "kivi-2bit:group=8", 60_000)
    read(cache, model, ids[:, :200])
    held = cache.compressed[0].stream.tokens
    assert 0 < held < 192
    other = KVCache(model, f"kivi-2bit:group=8,tail={200 - held}")
    read(other, model, ids[:, :200])
    assert torch.equal(read(cache, model, ids[:, 200:201]), read(other, model, ids[:, 200:201]))


def test_a_budget_that_is_too_small_compresses_all_it_can() -> None:
    model, ids = tiny("llama"), prompt(1, 100)
    small, usual = budgeted(model, "kivi-2bit:group=8", 10), KVCache(model, "kivi-2bit:group=8")
    for part in ids.split([60, 1, 39], 1):
        assert torch.equal(read(small, model, part), read(usual, model, part))
    assert small.nbytes == usual.nbytes


def test_generate_copies_and_crops_with_a_budget() -> None:
    model, ids = tiny("llama"), prompt(2, 100)
    full = budgeted(model, "int8:group=16", "1GB")
    model.generate(ids, past_key_values=full, max_new_tokens=30, do_sample=False)
    budget = full.nbytes * 9 // 10
    cache = budgeted(model, "int8:group=16", budget)
    assert model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False).shape == (2, 130)
    assert cache.compressed[0].stream.tokens and cache.nbytes <= budget
    other = copy.deepcopy(cache)
    for each in (cache, other):
        each.crop(-40)
        read(each, model, ids[:, :60])
        assert each.nbytes <= budget


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_comes_of_a_cache_keeps_within_its_budget(family: str, tmp_path: Path) -> None:
    """Converted, saved and loaded, pickled, or made for a call that gives none."""
    model, ids = tiny(family), prompt(1, 260)
    exact = KVCache(model, "full")
    read(exact, model, ids[:, :200])
    budget = exact.nbytes * 2 // 3
    cache = budgeted(model, "kivi-2bit:group=8", budget)
    read(cache, model, ids[:, :200])
    cache.save(tmp_path / "saved")
    options = {"budget": budget}
    model.eval()
    with compressed(model, "kivi-2bit:group=8", budget=budget):
        given = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
        implicit = model.generate(ids[:, :200], **given).past_key_values
    forms = {
        "converted": cache.converted("int8:group=16"),
        "copied": copy.deepcopy(cache),
        "loaded": KVCache.load(model, tmp_path / "saved", **options),
        "pickled": pickle.loads(pickle.dumps(cache)).load(model, **options),
        "implicit": implicit,
    }
    for name, form in forms.items():
        assert form.nbytes <= budget, name
        assert form.compressed[0].tail.shape[1] > 32, name
        for part in ids[:, 200:].split([40, 1, 19], 1):
            read(form, model, part)
            assert form.nbytes <= budget, name
            assert form.compressed[0].tail.shape[1] > 32, name


def test_a_budget_that_is_none_is_refused() -> None:
    model = tiny("llama")
    for budget in ("much", 0, -1):
        with pytest.raises(ValueError, match="is no size"):
            KVCache(model, "kivi-4bit:group=8", budget=budget)
    with pytest.raises(ValueError, match="every token reads the store"):
        KVCache(model, "kivi-4bit:group=8", attend="store", budget="1GB")

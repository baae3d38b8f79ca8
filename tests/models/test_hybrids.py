"""States of linear attention and convolutions: each way to another cache, or other sequences, takes them."""

import copy
import pickle
from collections.abc import Callable
from functools import cache as memoize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

from support.models import COMMON, prompt, tiny
from support.saved_caches import through_file
from xquant import KVCache, StaticKVCache, compat, parse_method
from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton

FAMILIES = ["falcon_h1", "qwen3_next", "qwen3_5", "granitemoehybrid", "lfm2"]
SPEC, OTHER = "full:group=8", "kivi-16bit:group=16"
IDS, MORE = prompt(3, 30), prompt(3, 6, seed=5)


@memoize
def model_of(family: str) -> Any:
    """With weights that make something of a state that is lost."""
    if family != "lfm2":
        return tiny(family, initializer_range=0.2)
    torch.manual_seed(0)
    own = {"layer_types": ["conv", "full_attention"] * 2 + ["conv"], "initializer_range": 0.2}
    return Lfm2ForCausalLM(Lfm2Config(**{**COMMON, **own}, block_auto_adjust_ff_dim=False)).eval()


@torch.no_grad()
def read(model: Any, cache: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, past_key_values=cache).logits
    return logits


@torch.no_grad()
def whole(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


Way = Callable[[Any, KVCache, Path], KVCache]
WAYS: dict[str, Way] = {
    "copied": lambda m, c, _: copy.deepcopy(c),
    "converted": lambda m, c, _: c.converted(OTHER),
    "converted alike": lambda m, c, _: c.converted(SPEC),
    "converted twice": lambda m, c, _: c.converted(OTHER).converted(SPEC),
    "loaded": lambda m, c, _: through_file(c),
    "converted and loaded": lambda m, c, f: through_file(c.converted(OTHER)),
    "loaded and converted": lambda m, c, f: through_file(c).converted(OTHER),
    "pickled": lambda m, c, _: pickle.loads(pickle.dumps(c)).load(m),
    "put back": lambda m, c, _: put_back(m, c),
}


def put_back(model: Any, cache: KVCache) -> KVCache:
    """After a pass that failed."""
    handle = model.get_output_embeddings().register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError):
        read(model, cache, MORE)
    handle.remove()
    return cache


def _fail(*_: Any) -> None:
    raise RuntimeError


FEW = ["converted", "converted and loaded"]
"""Ways of all families; the others differ by what keeps a state, beside keys and values or apart."""


@pytest.mark.parametrize(
    ("family", "way"),
    [(f, w) for f in FAMILIES for w in (WAYS if f in ("falcon_h1", "lfm2") else FEW)],
)
def test_states_come_along(family: str, way: str, tmp_path: Path) -> None:
    model, cache = model_of(family), KVCache(model_of(family), SPEC)
    read(model, cache, IDS)
    kept = cache.report()
    other = WAYS[way](model, cache, tmp_path)
    assert other.report().skipped_bytes == kept.skipped_bytes > 0
    assert other.is_initialized
    wanted = whole(model, torch.cat([IDS, MORE], 1))[:, 30:]
    for each in (other, cache):  # the one does not change the other
        torch.testing.assert_close(read(model, copy.deepcopy(each), MORE), wanted, atol=2e-3, rtol=2e-3)


SEQUENCES: dict[str, tuple[Callable[[KVCache], Any], list[int]]] = {
    "selected": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "reordered": (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "repeated": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("change", SEQUENCES)
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "lfm2"])
def test_states_are_those_of_the_sequences(family: str, change: str) -> None:
    model, (apply, kept) = model_of(family), SEQUENCES[change]
    cache = KVCache(model, SPEC)
    read(model, cache, IDS)
    cache = cache.converted(OTHER)
    apply(cache)
    wanted = whole(model, torch.cat([IDS, MORE], 1)[kept])[:, 30:]
    torch.testing.assert_close(read(model, cache, MORE[kept]), wanted, atol=2e-3, rtol=2e-3)
    cache.reset()
    assert not cache.is_initialized
    torch.testing.assert_close(read(model, cache, IDS), whole(model, IDS), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crop_is_as_in_transformers_own_cache(family: str) -> None:
    """Where states cannot go back both refuse; a cache that records them goes back."""
    model = model_of(family)
    for record in (False, True):
        found = []
        for cache in (DynamicCache(config=model.config), KVCache(model, SPEC)):
            if record:
                cache.activate_past_recording()
            read(model, cache, IDS)
            recording = [cache.is_recording_past(i) for i in range(len(cache))]
            try:
                cache.crop(-4)
                found.append((recording, cache.is_croppable, read(model, cache, MORE)))
            except RuntimeError as error:
                found.append((recording, cache.is_croppable, str(error)))
        (*theirs, wanted), (*ours, logits) = found
        assert ours == theirs and type(logits) is type(wanted)
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_states(family: str) -> None:
    model = model_of(family)
    layout = CacheLayout(Skeleton(model.config, torch.float32), parse_method(SPEC))
    cache = KVCache(model, SPEC)
    for tokens in (1, 30):
        cache.reset()
        read(model, cache, IDS[:, :tokens])
        held, report = layout.count(tokens, 3), cache.report()
        assert held.skipped == report.skipped_bytes > 0
        assert held.total == report.cache_bytes
        assert layout.full_nbytes(tokens, 3) == report.full_cache_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_what_keeps_no_states_refuses_them(family: str) -> None:
    with pytest.raises(ValueError, match="has no static cache"):
        StaticKVCache(model_of(family), "kivi-16bit:group=32", 64)


def test_a_transformers_that_looks_for_states_in_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "STATES_ARE_ASKED_OF_CACHES", False)
    with pytest.raises(ValueError, match="update transformers to 5"):
        KVCache(tiny("falcon_h1"), "kivi-4bit:group=8")
    KVCache(tiny("granitemoehybrid"), "kivi-4bit:group=8")  # its states are in layers of their own

"""What `tc-cl` predicts from a token's id: ids are kept with the tokens, and those without one are served."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.caches import calibration, make_cache
from support.models import left_padded, prompt, tiny
from support.saved_caches import loaded
from xquant import KVCache, PrefixStore
from xquant.past.tokens import UNKNOWN, look_up

SPEC = "tc-cl-2bit:group=16"


def filled(model: Any, spec: str = SPEC, **inputs: Tensor) -> KVCache:
    cache = make_cache(model, spec)
    with torch.inference_mode():
        model(**inputs, past_key_values=cache, use_cache=True)
    return cache


def error(cache: KVCache, exact: KVCache, layers: slice = slice(None)) -> float:
    pairs = zip(cache.compressed[layers], exact.compressed[layers], strict=True)
    states = [(a, b) for one, two in pairs for a, b in zip(one.states(), two.states(), strict=True)]
    return sum(float((found - true).norm() / true.norm()) for found, true in states)


def test_rows_of_unknown_tokens_are_zero() -> None:
    embedding = torch.arange(1, 7).view(3, 2).half()
    found = look_up(embedding, torch.tensor([[0, 2, UNKNOWN, 3]]))
    assert found.tolist() == [[[1, 2], [5, 6], [0, 0], [0, 0]]]


def test_the_lowest_layer_follows_from_the_token() -> None:
    model, ids = tiny("llama"), prompt(2, 64)
    full = filled(model, "full:group=16", input_ids=ids)
    lowest = slice(0, 1)
    known = error(filled(model, input_ids=ids), full, lowest)
    unknown = error(filled(model, f"{SPEC},embedding=false", input_ids=ids), full, lowest)
    assert known < 0.05 * unknown


def test_a_prompt_of_embeddings_is_kept_without_ids() -> None:
    """It reads worse than one of ids, and follows its own tokens in every way."""
    model, ids = tiny("llama"), prompt(2, 64)
    full = filled(model, "full:group=16", input_ids=ids)
    cache = filled(model, inputs_embeds=model.get_input_embeddings()(ids))
    assert bool((cache.index.ids == UNKNOWN).all())
    of_ids = error(filled(model, input_ids=ids), full)
    assert of_ids < error(cache, full) < 20 * of_ids


def test_ids_follow_every_change(tmp_path: Path) -> None:
    model = tiny("llama")
    inputs = left_padded([40, 64])
    cache = filled(model, **inputs)
    assert torch.equal(cache.index.ids, inputs["input_ids"].int())
    cache.crop(-20)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    assert torch.equal(cache.index.ids, inputs["input_ids"][[1, 0, 1], :44].int())
    other = loaded(cache, tmp_path / "c")
    assert torch.equal(other.index.ids, cache.index.ids)
    for mine, theirs in zip(cache.compressed, other.compressed, strict=True):
        assert mine.keys is not None and theirs.keys is not None
        assert torch.equal(mine.keys, theirs.keys)


def test_ids_survive_a_method_that_does_not_ask_for_them() -> None:
    model, ids = tiny("llama"), prompt(1, 64)
    spec, found = SPEC, calibration(model, SPEC)
    direct = filled(model, "full:group=16", input_ids=ids)
    again = direct.converted("int8:group=16").converted(spec, found)
    assert torch.equal(again.index.ids, ids.int())
    assert error(again, direct) < 1.2 * error(filled(model, input_ids=ids), direct)


def test_a_store_of_prefixes_reads_by_the_ids_it_is_given(tmp_path: Path) -> None:
    """Codes that were made without ids are made anew with those under which they are stored."""
    model, ids = tiny("llama"), prompt(1, 140)
    store = PrefixStore(tmp_path, model, SPEC, calibration=calibration(model, SPEC))
    full = filled(model, "full:group=16", input_ids=ids[:, :128])
    cache = filled(model, inputs_embeds=model.get_input_embeddings()(ids))
    assert store.put(cache, ids) == [128]
    found = store.get(ids)
    assert found is not None and found.get_seq_length() == 128
    assert torch.equal(found.index.ids, ids[:, :128].int())
    cache.crop(-12)
    of_ids = error(filled(model, input_ids=ids[:, :128]), full)
    assert error(found, full) < error(cache, full) + 2 * of_ids

"""PrefixStore: what is found again is what was put, whoever else uses the folder."""

from functools import cache as memoize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration
from support.method_matrix import RIVALS
from support.models import left_padded, prompt, tiny
from support.saved_caches import SOME
from support.unusual_models import SWITCH, dynamic_rope, long_rope
from xquant import KVCache, PrefixStore, parse_method

SPEC = "kivi-2bit:group=32,sink=2"
KEEPS_STATES = ["kivi-4bit:group=32,sink=1", "tc-cl-2bit:group=32", "kvquant-2bit-1%:group=32"]


@memoize
def model_of(family: str) -> Any:
    with torch.inference_mode(False):
        return tiny(family)


def filled(model: Any, spec: str, ids: Tensor, **more: Any) -> KVCache:
    cache = KVCache(model, spec, calibration=calibration(model, parse_method(spec)))
    with torch.inference_mode():
        model(ids, past_key_values=cache, **more)
    return cache


def store_of(folder: Path, model: Any, spec: str, limit: int | str = "1GB") -> PrefixStore:
    return PrefixStore(folder, model, spec, limit, calibration(model, parse_method(spec)))


@torch.inference_mode()
def go_on(cache: KVCache, ids: Tensor) -> Tensor:
    model = cache.attachment.view.model
    parts = [model(part, past_key_values=cache).logits for part in ids.split([1, 20, 1, 150], 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("spec", [*SOME, *RIVALS, "full:group=8"])
def test_a_prefix_goes_on_as_the_cache_that_was_put(spec: str, tmp_path: Path) -> None:
    model = model_of("llama")
    cache = filled(model, spec, prompt(2, 300))
    store = store_of(tmp_path, model, spec)
    stored = store.put(cache, prompt(2, 300))
    sealed = cache.compressed[0].stream.tokens // store.chunk * store.chunk
    assert stored == [sealed, sealed] and sealed >= 128
    found = store.get(prompt(2, 300)[1])
    assert found is not None and found.get_seq_length() == sealed
    cache.batch_select_indices(torch.tensor([1]))
    cache.crop(sealed - 300)
    following = prompt(1, 172, seed=5)
    assert torch.equal(go_on(found, following), go_on(cache, following))


def test_prompts_share_chunks_and_the_longest_prefix_is_found(tmp_path: Path) -> None:
    model = model_of("llama")
    store = store_of(tmp_path, model, SPEC)
    first = prompt(1, 700)
    second = torch.cat([first[:, :300], prompt(1, 400, seed=8)], 1)
    assert store.put(filled(model, SPEC, first), first) == [640]
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert store.put(filled(model, SPEC, second), second) == [640]
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    for ids, length in ((first, 640), (second, 640), (first[:, :640], 512), (first[:, :641], 640)):
        found = store.get(ids)
        assert found is not None and found.get_seq_length() == length
    assert store.get(first[0, :128].tolist()) is None
    assert store.get(prompt(1, 300, seed=8)) is None
    other = torch.cat([first[:, :130], first[:, 131:]], 1)
    found = store.get(other)
    assert found is not None and found.get_seq_length() == 128


def padded(model: Any, spec: str, lengths: list[int]) -> tuple[KVCache, Tensor]:
    batch = left_padded(lengths)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return filled(model, spec, ids, attention_mask=mask, position_ids=positions), ids


@pytest.mark.parametrize("stored", KEEPS_STATES)
def test_padded_sequences_are_stored_as_if_they_were_alone(stored: str, tmp_path: Path) -> None:
    model = model_of("llama")
    cache, ids = padded(model, "full", [300, 40, 170])
    before, store = cache.report(), store_of(tmp_path, model, stored)
    assert store.put(cache, ids) == [256, 0, 128] and cache.report() == before
    own = ids[2:, 130:]
    made = calibration(model, parse_method(stored))
    alone = filled(model, "full", own).converted(stored, made)
    alone.crop(128 - 170)
    found = store.get(own)
    assert found is not None and found.get_seq_length() == 128
    following = prompt(1, 172, seed=5)
    assert torch.allclose(go_on(found, following), go_on(alone, following), atol=2e-2)
    fast = store.get(own, "int8")
    assert fast is not None and fast.method.spec == "int8" and fast.get_seq_length() == 128


@pytest.mark.parametrize("given", [*KEEPS_STATES, "xquant-4bit:group=32", "kivi-2bit:rope=post"])
def test_a_cache_of_another_method_is_stored_as_it_reads(given: str, tmp_path: Path) -> None:
    model = model_of("llama")
    made = calibration(model, parse_method(given))
    cache, ids = padded(model, given, [300, 40, 170]) if made is None else (None, prompt(3, 300))
    cache = filled(model, given, ids) if cache is None else cache
    held = [layer.held() for layer in cache.converted("full").compressed]
    store = store_of(tmp_path, model, "full")
    stored = store.put(cache, ids)
    for i, length in enumerate(stored):
        if not length:
            continue
        real = cache.index.real[i]
        found = store.get(ids[i][real])
        assert found is not None and found.get_seq_length() == length
        for layer, states in zip(found.compressed, held, strict=True):
            for mine, theirs in zip(layer.held(), states, strict=True):
                assert torch.equal(mine[0], theirs[i, real][:length])


def test_generate_goes_on_from_a_prefix(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(1, 300)
    store = store_of(tmp_path, model, "full")
    want = model.generate(ids, past_key_values=(cache := KVCache(model, "full")), max_new_tokens=9)
    assert store.put(cache, want[:, : cache.get_seq_length()]) == [256]
    found = store.get(ids)
    assert torch.equal(model.generate(ids, past_key_values=found, max_new_tokens=9), want)


def test_a_prefix_keeps_the_frequencies_that_it_had(tmp_path: Path) -> None:
    """A long prompt finds what was turned as it is; a cache with both sets is not stored."""
    model, ids, spec = long_rope(), prompt(1, SWITCH + 200), "kivi-4bit:group=8,rope=post"
    store, cache = store_of(tmp_path, model, spec), filled(model, spec, ids)
    assert store.put(cache, ids) == [128]
    found = store.get(ids)
    assert found is not None and found.index.rope_spans == ((128, True),)
    cache.crop(128 - SWITCH - 200)
    assert torch.equal(go_on(found, prompt(1, 172, seed=5)), go_on(cache, prompt(1, 172, seed=5)))
    both = filled(model, spec, ids[:, : SWITCH - 2])
    with torch.inference_mode():
        model(ids[:, SWITCH - 2 :], past_key_values=both)
    with pytest.raises(ValueError, match="positions of their own"):
        store.put(both, ids)


def test_methods_and_models_share_a_folder(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(1, 300)
    stores = [store_of(tmp_path, model, spec) for spec in KEEPS_STATES]
    other = store_of(tmp_path, model_of("llama-mha"), KEEPS_STATES[0])
    for store in stores:
        assert store.get(ids) is None
        store.put(filled(model, store.method.spec, ids), ids)
    assert other.get(ids) is None
    for store in stores:
        assert store.get(ids) is not None
    assert stores[0].nbytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    stores[0].clear()
    assert stores[1].get(ids) is None and stores[1].nbytes == 0


# -- what is refused -----------------------------------------------------------------------------------


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(2, 200)
    for limit in ("much", "-3", 0, "3 PB"):
        with pytest.raises(ValueError, match="is no size"):
            PrefixStore(tmp_path / "s", model, SPEC, limit)
    with pytest.raises(ValueError, match="by other angles for every length"):
        PrefixStore(tmp_path / "s", dynamic_rope(), "kivi-4bit:group=8,rope=post")
    assert not (tmp_path / "s").exists()
    store = store_of(tmp_path / "s", model, SPEC)
    with pytest.raises(ValueError, match="one of another model"):
        store.put(filled(tiny("llama"), SPEC, ids), ids)
    with pytest.raises(ValueError, match=r"the tokens are int64 \[1, 200\]"):
        store.put(filled(model, SPEC, ids), ids[:1])
    odd = filled(model, SPEC, ids, position_ids=torch.arange(7, 207)[None])
    with pytest.raises(ValueError, match="positions of their own"):
        store.put(odd, ids)
    with pytest.raises(ValueError, match="one prompt"):
        store.get(ids)
    inputs = store_of(tmp_path / "s", model, "xquant-4bit:group=32")
    with pytest.raises(ValueError, match="cannot be converted to xquant"):
        inputs.put(filled(model, SPEC, ids), ids)
    assert store.nbytes == 0


def test_a_block_that_was_cut_short_ends_what_is_stored(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(1, 400)
    cache = filled(model, SPEC, ids[:, :280])
    cache.crop(-70)
    with torch.inference_mode():
        model(ids[:, 210:], past_key_values=cache)
    assert store_of(tmp_path, model, SPEC).put(cache, ids) == [128]

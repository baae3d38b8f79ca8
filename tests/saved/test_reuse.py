"""KVCache.reuse: of a saved prompt, what another begins with is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import prompt
from support.saved_caches import loaded, model_of
from xquant import KVCache


def saved_prompt(family: str, ids: Tensor, file: Path) -> KVCache:
    """A cache of these ids, by way of a file."""
    model = model_of(family)
    cache = KVCache(model, "kivi-2bit:group=8")
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    return loaded(cache, file, ids)


@torch.inference_mode()
def go_on_with(cache: KVCache, ids: Tensor) -> Tensor:
    logits: Tensor = cache.attachment.view.model(ids, past_key_values=cache).logits
    return logits


def test_what_a_prompt_has_in_common_with_a_saved_one_is_kept(tmp_path: Path) -> None:
    ids, other = prompt(1, 50), prompt(1, 30, seed=4)
    for question, kept in (
        (torch.cat([ids, other], 1), 50),
        (torch.cat([ids[:, :33], other], 1), 33),
        (ids, 49),
        (ids[:, :20], 19),
        (other, 0),
    ):
        cache = saved_prompt("llama", ids, tmp_path / "c")
        wanted = saved_prompt("llama", ids, tmp_path / "c")
        assert cache.reuse(question) == kept == cache.get_seq_length()
        assert (None if cache.saved_tokens is None else cache.saved_tokens.shape[1]) == (kept or None)
        wanted.crop(kept - 50) if kept else wanted.reset()
        assert torch.equal(go_on_with(cache, question[:, kept:]), go_on_with(wanted, question[:, kept:]))


def test_tokens_that_came_later_are_not_taken_for_saved_ones(tmp_path: Path) -> None:
    ids, other = prompt(1, 50), prompt(1, 30, seed=4)
    cache = saved_prompt("llama", ids, tmp_path / "c")
    cache.crop(-20)
    go_on_with(cache, other)
    assert cache.reuse(ids) == 30
    cache = saved_prompt("llama", prompt(2, 50), tmp_path / "c")
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.reuse(prompt(2, 50)[1:]) == 49 and cache.reuse(prompt(2, 50)[:1]) == 0
    cache = saved_prompt("llama", ids, tmp_path / "c").converted("int8")
    assert cache.reuse(ids) == 49


def test_one_prompt_serves_several_sequences_and_beams(tmp_path: Path) -> None:
    ids = prompt(1, 50)
    questions = torch.cat([ids.expand(3, -1), prompt(3, 9, seed=4)], 1)
    cache = saved_prompt("llama", ids, tmp_path / "c")
    assert cache.reuse(questions) == 50 and cache.compressed[0].stream.blocks == 6
    assert len(go_on_with(cache, questions[:, 50:])) == 3
    model = model_of("llama")
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5}
    beams = saved_prompt("llama", ids, tmp_path / "c")
    assert beams.reuse(questions[:1].repeat(3, 1)) == 50
    found = model.generate(questions[:1], past_key_values=beams, **options)
    fresh = KVCache(model, "kivi-2bit:group=8")
    go_on_with(fresh, ids)
    fresh.batch_repeat_interleave(3)
    assert torch.equal(found, model.generate(questions[:1], past_key_values=fresh, **options))


def test_what_cannot_go_back_is_read_anew(tmp_path: Path) -> None:
    ids = prompt(1, 50)
    for family, question, kept in (
        ("gemma3", torch.cat([ids, ids], 1), 50),
        ("gemma3", ids[:, :40], 0),
        ("qwen3_next", torch.cat([ids, ids], 1), 50),
        ("qwen3_next", ids[:, :40], 0),
    ):
        cache = saved_prompt(family, ids, tmp_path / "c")
        assert cache.reuse(question) == kept == cache.get_seq_length()
        wanted = model_of(family)(question, use_cache=False).logits[:, kept:]
        error = (go_on_with(cache, question[:, kept:]) - wanted).norm() / wanted.norm()
        assert error < (0.5 if kept else 1e-4)


def test_ids_that_are_not_known_are_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = KVCache(model, "kivi-2bit:group=8")
    with pytest.raises(ValueError, match="are not known"):
        cache.reuse(prompt(1, 20))
    cache = saved_prompt("llama", prompt(2, 50), tmp_path / "c")
    for ids in (prompt(3, 50), prompt(1, 50)[0]):
        with pytest.raises(ValueError, match="this cache holds 2 sequences"):
            cache.reuse(ids)
    assert cache.get_seq_length() == 50

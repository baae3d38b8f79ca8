"""A layer that drops tokens: which it keeps, and that attention over all of them is the model's."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from support.models import left_padded, prompt, tiny
from xquant import KVCache, Pyramid
from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton

SPEC = "pyramid:keep=0.5,slope=0.5,tail=4,group=1"


def kept(cache: KVCache) -> list[int]:
    return [layer.columns.shape[1] for layer in cache.compressed]


@torch.inference_mode()
def test_upper_layers_keep_less_and_the_mean_is_what_was_asked_for() -> None:
    model = tiny("llama")
    cache = KVCache(model, SPEC)
    model(prompt(2, 104), past_key_values=cache)
    assert kept(cache) == [4 + 75, 4 + 63, 4 + 50, 4 + 38, 4 + 25]


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("slope", [0, 0.5, 1])
def test_shares_are_between_none_and_all(keep: float, slope: float) -> None:
    method = Pyramid(keep=keep, slope=slope)
    shares = [method.share(i, 7) for i in range(7)]
    assert sum(shares) / 7 == pytest.approx(keep)
    assert all(0 <= share <= 1 for share in shares)


@torch.inference_mode()
def test_tokens_are_kept_by_the_attention_of_the_newest() -> None:
    """As transformers' own eager attention has it."""
    model = tiny("llama")
    model.set_attn_implementation("eager")
    ids = prompt(2, 60)
    weights = model(ids, output_attentions=True).attentions
    cache = KVCache(model, SPEC)
    model(ids, past_key_values=cache)
    for layer, own in zip(cache.compressed, weights, strict=True):
        worth = own[:, :, -4:].mean((1, 2))
        worth[:, -4:] = torch.inf
        want = worth.sort(dim=1, descending=True, stable=True).indices[:, : layer.columns.shape[1]]
        assert torch.equal(layer.columns.long(), want.sort(1).values)


@torch.inference_mode()
def test_what_is_left_is_attended_to_at_its_own_positions() -> None:
    """The same as hiding the dropped tokens from the full cache, in a model of one layer."""
    model = tiny("llama", num_hidden_layers=1)
    ids = prompt(1, 60)
    cache, full = KVCache(model, SPEC), DynamicCache(config=model.config)
    for one in (cache, full):
        model(ids[:, :50], past_key_values=one)
    seen = torch.zeros(1, 60, dtype=torch.long)
    seen[:, cache.compressed[0].columns[0].long()] = 1
    seen[:, 50:] = 1
    positions = torch.arange(50, 60)[None]
    want = model(ids[:, 50:], attention_mask=seen, position_ids=positions, past_key_values=full)
    got = model(ids[:, 50:], past_key_values=cache)
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_padding_goes_first_and_sinks_stay() -> None:
    model = tiny("llama")
    batch: dict[str, Any] = left_padded([60, 40])
    cache = KVCache(model, SPEC + ",sink=3")
    model(**batch, past_key_values=cache)
    for layer in cache.compressed:
        columns, real = layer.columns.long(), cache.index.real
        rows = columns.shape[1]
        assert int(real.gather(1, columns)[1].sum()) == min(rows, 40)
        assert set(columns[0].tolist()) >= {0, 1, 2}
        assert set(columns[1].tolist()) >= {20, 21, 22}


@torch.inference_mode()
def test_a_failed_pass_brings_back_what_was_dropped_since() -> None:
    model = tiny("llama")
    ids = prompt(1, 40)
    cache, other = KVCache(model, SPEC), KVCache(model, SPEC)
    for one in (cache, other):
        model(ids[:, :30], past_key_values=one)
    state = cache.snapshot()
    model(ids[:, 30:], past_key_values=cache)
    cache.restore(state)
    got, want = (model(ids[:, 30:], past_key_values=one).logits for one in (cache, other))
    assert torch.equal(got, want)


@torch.inference_mode()
def test_a_batch_is_cropped_within_its_newest_tokens() -> None:
    model = tiny("llama")
    cache = KVCache(model, SPEC)
    model(prompt(3, 60), past_key_values=cache)
    before = [layer.columns.clone() for layer in cache.compressed]
    with pytest.raises(
        ValueError, match=r"has dropped tokens: .* within its newest 4 tokens alone"
    ):
        cache.crop(-31)
    for layer, columns in zip(cache.compressed, before, strict=True):
        assert torch.equal(layer.columns, columns)
    cache.crop(-3)
    for layer, columns in zip(cache.compressed, before, strict=True):
        assert torch.equal(layer.columns, columns[:, :-3])
    assert cache.get_seq_length() == 57


@torch.inference_mode()
def test_bytes_are_what_the_plan_says() -> None:
    model = tiny("llama")
    cache = KVCache(model, SPEC)
    model(prompt(2, 90), past_key_values=cache)
    layout = CacheLayout(Skeleton(model.config, torch.float32), cache.method)
    assert cache.nbytes == layout.count(90, 2).total == layout.peak(90, 2)


@torch.inference_mode()
def test_what_it_cannot_do_is_refused_by_name() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="drops tokens once later ones were seen"):
        KVCache(model, SPEC, attend="store")
    cache = KVCache(model, SPEC)
    model(prompt(2, 60), past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot be saved: it drops tokens"):
        cache.save("nowhere.cache")
    with pytest.raises(ValueError, match=r"cannot be converted: it drops tokens"):
        cache.converted("kivi-4bit")
    with pytest.raises(ValueError, match=r"cannot be converted: it drops tokens"):
        KVCache(model, "kivi-4bit").converted(SPEC)

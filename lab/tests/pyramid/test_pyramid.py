"""A cache that drops tokens: which it keeps, and that attention over all of them is the model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from support.generation import OPERATIONS, Operation
from support.models import left_padded, prompt, tiny
from xquant import KVCache, PrefixStore, StaticKVCache, parse_method
from xquant.analysis.shapes import Skeleton
from xquant_lab.pyramid import Pyramid
from xquant_lab.pyramid.cache import PyramidCache
from xquant_lab.pyramid.layout import layout_of

SPEC = "pyramid:keep=0.5,slope=0.5,tail=4,group=1"
CROPPING = ("crop_and_continue", "assisted", "prompt_lookup")


def cache_of(model: Any, spec: str = SPEC) -> PyramidCache:
    return PyramidCache(model, parse_method(spec))


def kept(cache: PyramidCache) -> list[int]:
    return [layer.columns.shape[1] for layer in cache.evicting]


@torch.inference_mode()
def test_upper_layers_keep_less_and_the_mean_is_what_was_asked_for() -> None:
    model = tiny("llama")
    cache = cache_of(model)
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
    cache = cache_of(model)
    model(ids, past_key_values=cache)
    for layer, own in zip(cache.evicting, weights, strict=True):
        worth = own[:, :, -4:].mean((1, 2))
        worth[:, -4:] = torch.inf
        want = worth.sort(dim=1, descending=True, stable=True).indices[:, : layer.columns.shape[1]]
        assert torch.equal(layer.columns.long(), want.sort(1).values)


@torch.inference_mode()
def test_what_is_left_is_attended_to_at_its_own_positions() -> None:
    """The same as hiding the dropped tokens from the full cache, in a model of one layer."""
    model = tiny("llama", num_hidden_layers=1)
    ids = prompt(1, 60)
    cache, full = cache_of(model), DynamicCache(config=model.config)
    for one in (cache, full):
        model(ids[:, :50], past_key_values=one)
    seen = torch.zeros(1, 60, dtype=torch.long)
    seen[:, cache.evicting[0].columns[0].long()] = 1
    seen[:, 50:] = 1
    positions = torch.arange(50, 60)[None]
    want = model(ids[:, 50:], attention_mask=seen, position_ids=positions, past_key_values=full)
    got = model(ids[:, 50:], past_key_values=cache)
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_padding_goes_first_and_sinks_stay() -> None:
    model = tiny("llama")
    batch: dict[str, Any] = left_padded([60, 40])
    cache = cache_of(model, SPEC + ",sink=3")
    model(**batch, past_key_values=cache)
    for layer in cache.evicting:
        columns, real = layer.columns.long(), cache.index.real
        rows = columns.shape[1]
        assert int(real.gather(1, columns)[1].sum()) == min(rows, 40)
        assert set(columns[0].tolist()) >= {0, 1, 2}
        assert set(columns[1].tolist()) >= {20, 21, 22}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
@torch.inference_mode()
def test_what_drops_nothing_is_the_full_cache(family: str) -> None:
    model, batch = tiny(family), left_padded([33, 9])
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        own, full = (
            cache_of(model, "pyramid:keep=1,tail=5,group=8"),
            DynamicCache(config=model.config),
        )
        got, want = (
            model.generate(**batch, past_key_values=cache, max_new_tokens=12, do_sample=False)
            for cache in (own, full)
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("spec", ["pyramid:tail=6,group=8", "pyramid:keep=0.3,slope=1,tail=5,group=1,sink=2"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_lengths_and_positions_are_those_of_all_tokens(family: str, spec: str, operation: Operation) -> None:
    if operation.__name__ in CROPPING:
        pytest.skip("what was dropped does not come back")
    model, caches = tiny(family), []

    def make() -> PyramidCache:
        caches.append(cache_of(model, spec))
        return caches[-1]

    tokens, cache = operation(model, make), caches[-1]
    assert tokens.shape[1] - cache.get_seq_length() in (0, 1)
    ranks = (cache.index.real.cumsum(1) - 1).int()
    assert torch.equal(cache.index.positions[cache.index.real], ranks[cache.index.real])
    for layer in cache.evicting:
        assert layer.get_seq_length() == cache.index.length
        assert layer.columns.shape == layer.weights.shape == layer.keys[:, 0, :, 0].shape
        most = cache.method.kept(cache.index.length, layer.share) + cache.method.group
        assert layer.columns.shape[1] < most
        assert (layer.columns.diff(dim=1) > 0).all()


@torch.inference_mode()
def test_a_failed_pass_empties_the_cache() -> None:
    model, ids = tiny("llama"), prompt(1, 30)
    cache = cache_of(model)
    model(ids, past_key_values=cache)
    handle = model.model.layers[2].register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, past_key_values=cache)
    handle.remove()
    assert cache.get_seq_length() == cache.index.length == 0
    got, want = (model(ids, past_key_values=one).logits for one in (cache, cache_of(model)))
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_bytes_are_what_the_plan_says(family: str) -> None:
    model = tiny(family)
    cache = cache_of(model)
    model(prompt(2, 90), past_key_values=cache)
    layout, report = layout_of(Skeleton(model.config, torch.float32), cache.method), cache.report()
    assert report.cache_bytes == layout.count(90, 2).total == layout.peak(90, 2)
    assert report.tail_bytes == sum(layer.nbytes for layer in cache.evicting)
    assert report.full_cache_bytes == layout.full_nbytes(90, 2)


@torch.inference_mode()
def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="drops tokens once later ones were seen"):
        KVCache(model, SPEC, attend="store")
    for make in (
        lambda: KVCache(model, SPEC),
        lambda: KVCache(model, "kivi-4bit").converted(SPEC),
        lambda: StaticKVCache(model, "pyramid", 100),
        lambda: PrefixStore(tmp_path, model, "pyramid", "1GB"),
    ):
        with pytest.raises(ValueError, match="drops tokens, and caches of xquant keep all of them"):
            make()
    cache = cache_of(model)
    model(prompt(2, 60), past_key_values=cache)
    with pytest.raises(ValueError, match="has dropped tokens: its cache cannot be cropped"):
        cache.crop(-3)

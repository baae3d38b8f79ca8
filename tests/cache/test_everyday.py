"""What people do with a model and a cache in Python, beside generating."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from support.caches import make_cache
from support.method_matrix import IDENTITY
from support.models import left_padded, pickled, prompt, saved, tiny
from xquant import KVCache, StaticKVCache, detach
from xquant.compat import CACHE


def two_passes(model: Any, cache: Any) -> Tensor:
    """Logits of a second forward pass."""
    ids = prompt(2, 46)
    model(ids[:, :40], past_key_values=cache)
    logits: Tensor = model(ids[:, 40:], past_key_values=cache).logits
    return logits


# -- saving and copying models ---------------------------------------------------------------------


@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_with_hooks_is_copied_and_saved(family: str, way: Callable[[Any], Any]) -> None:
    model = tiny(family)
    used = KVCache(model, "xquant-16bit:group=8")
    want = two_passes(model, used).detach()
    other = way(model)
    assert torch.equal(other(prompt()).logits, model(prompt()).logits)
    cache = KVCache(other, "xquant-16bit:group=8")
    assert torch.equal(two_passes(other, cache), want)
    with pytest.raises(ValueError, match="made for another model"):
        two_passes(other, used)
    for layer in other.model.layers:
        layer.self_attn.k_proj.weight.data.mul_(2)
    assert torch.equal(two_passes(model, KVCache(model, "xquant-16bit:group=8")), want)
    detach(other)
    assert other.config._attn_implementation == "sdpa"


def test_what_a_method_built_is_not_saved_with_the_model() -> None:
    model = tiny("llama")
    plain = len(pickle.dumps(model))
    KVCache(model, "xquant-4bit")
    assert len(pickle.dumps(model)) < plain + 50_000


def test_a_model_with_hooks_is_saved_as_transformers_does(tmp_path: Any) -> None:
    model = tiny("llama")
    KVCache(model, "kivi-4bit")
    model.save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(other(prompt()).logits, model(prompt()).logits)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("spec", [*IDENTITY, "kivi-4bit:group=8", "tc-cl-1.5bit:group=16"])
def test_without_no_grad_the_logits_are_the_same(spec: str, kernel: str) -> None:
    model = tiny("llama")
    with torch.no_grad():
        want = two_passes(model, make_cache(model, spec, kernel=kernel))
    torch.testing.assert_close(
        two_passes(model, make_cache(model, spec, kernel=kernel)).detach(), want, rtol=0, atol=1e-4
    )


def test_gradients_of_a_first_pass_are_right_and_of_a_later_one_refused() -> None:
    model, found = tiny("llama"), []
    for cache in (KVCache(model, "kivi-4bit:group=8"), DynamicCache(config=model.config)):
        model.zero_grad()
        model(prompt(), past_key_values=cache).logits.sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    for spec, attend in (("kivi-4bit:group=8", "chunk"), ("full:group=8", "store")):
        loss = two_passes(model, KVCache(model, spec, attend)).sum()
        with pytest.raises(RuntimeError, match="gradients do not go back through"):
            loss.backward()


@pytest.mark.parametrize("kernel", ["auto", "folded", "reference"])
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32"])
def test_gradients_through_a_kernel_are_refused(spec: str, kernel: str) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128)
    cache = KVCache(model, spec, kernel=kernel)
    with torch.no_grad():
        model(prompt(1, 70), past_key_values=cache)
    loss = model(prompt(1, 2), past_key_values=cache).logits.sum()
    with pytest.raises(RuntimeError, match="gradients do not go back through"):
        loss.backward()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradients_where_a_layer_is_given_whole_states(implementation: str) -> None:
    from support.unusual_models import built

    model = built("DiffLlama", attn_implementation=implementation)
    for _ in range(2):
        loss = two_passes(model, KVCache(model, "kivi-16bit:group=8")).sum()
        with pytest.raises(RuntimeError, match="gradients do not go back through"):
            loss.backward()


def test_gradient_checkpointing() -> None:
    model = tiny("llama")
    cache = KVCache(model, "kivi-4bit:group=8")
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match=r"gradient checkpointing.*model\.eval\(\)"):
        model(prompt(), past_key_values=cache)
    model(prompt(), past_key_values=DynamicCache(config=model.config)).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
    model.eval()
    assert two_passes(model, cache).isfinite().all()


def test_what_was_filled_in_inference_mode_is_gone_on_with_outside() -> None:
    model = tiny("llama")
    cache, other = (KVCache(model, "kivi-4bit:group=8,sink=2") for _ in range(2))
    ids = prompt(1, 70)
    with torch.inference_mode():
        model(ids[:, :40], past_key_values=cache)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=other)
    for start, mode in ((40, torch.no_grad()), (52, torch.enable_grad()), (61, torch.no_grad())):
        with mode:
            got, want = (model(ids[:, start : start + 9], past_key_values=c) for c in (cache, other))
        assert torch.equal(got.logits, want.logits)


@pytest.mark.parametrize("spec", ["full:group=8", "kivi-16bit:group=8", "xquant-16bit:group=8"])
def test_double_precision(spec: str) -> None:
    model = tiny("llama").double()
    want = two_passes(model, DynamicCache(config=model.config))
    torch.testing.assert_close(two_passes(model, KVCache(model, spec)), want, rtol=0, atol=1e-9)
    assert two_passes(model, KVCache(model, "kivi-4bit:group=32")).isfinite().all()


def test_autocast() -> None:
    model = tiny("llama")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = two_passes(model, DynamicCache(config=model.config))
        assert torch.equal(two_passes(model, KVCache(model, "full:group=8")), want)
        exact = two_passes(model, KVCache(model, "kivi-16bit:group=8"))
        torch.testing.assert_close(exact, want, rtol=0, atol=0.5)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("spec", ["kivi-4bit", "xquant-4bit", "xquant-cl-4bit", "kvquant-4bit-1%"])
def test_autocast_with_sinks(spec: str, kernel: str) -> None:
    """The rows of a layer are of the autocast dtype, what is rebuilt of its codes is of the model's."""
    model = tiny("llama")
    spec = f"{spec}:group=8,sink=2"
    with torch.no_grad():
        want = two_passes(model, make_cache(model, spec, kernel=kernel))
        with torch.autocast("cpu", torch.bfloat16):
            found = two_passes(model, make_cache(model, spec, kernel=kernel))
    assert (found - want).abs().mean() < 0.25 * want.abs().mean()


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_in_the_wrong_order_or_of_the_wrong_kind() -> None:
    model = tiny("llama")
    with pytest.raises(TypeError, match=r"not str: the model comes first, KVCache\("):
        KVCache("kivi-4bit", model)
    with pytest.raises(TypeError, match=r"not str: the model comes first, StaticKVCache\("):
        StaticKVCache("kivi-4bit", model, 64)
    with pytest.raises(TypeError, match="a spec string or a Method, not int"):
        KVCache(model, 4)
    for thing in (None, torch.nn.Linear(2, 2), model.config):
        with pytest.raises(TypeError, match=f"not {type(thing).__name__}"):
            KVCache(thing, "kivi-4bit")


def test_a_model_and_its_decoder_share_their_hooks() -> None:
    model = tiny("llama")
    outer, inner = (KVCache(m, "kivi-16bit:group=8") for m in (model, model.model))
    assert outer.attachment is inner.attachment
    with torch.no_grad():
        want = two_passes(model, DynamicCache(config=model.config))
        for cache in (outer, inner):
            torch.testing.assert_close(two_passes(model, cache), want, rtol=0, atol=1e-4)
        inner.reset()
        model.model(prompt(), past_key_values=inner)
        assert inner.get_seq_length() == 40
    detach(model.model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Adapter(torch.nn.Module):
    """A linear layer with a low-rank addition that can be switched off, as peft's."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.on = base, True
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2) * 0.3)
        self.dropout = torch.nn.Dropout(0.5)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def forward(self, x: Tensor) -> Tensor:
        more = self.dropout(x) @ self.down.T @ self.up.T
        return self.base(x) + more if self.on else self.base(x)


def merge(model: Any, name: str) -> None:
    for layer in model.model.layers:
        adapter = getattr(layer.self_attn, name)
        adapter.base.weight.data += adapter.up.data @ adapter.down.data
        setattr(layer.self_attn, name, adapter.base)


@pytest.mark.parametrize("spec", ["xquant-16bit:group=8", "xquant-cl-16bit:group=8,first_bits=16"])
@torch.no_grad()
def test_adapters_on_projections(spec: str) -> None:
    """Right while they are apart, switched off and merged; with dropout, named as the cause."""
    model = tiny("llama")
    old = KVCache(model, spec)
    two_passes(model, old)
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)).eval())

    def check(cache: KVCache) -> None:
        want = two_passes(model, DynamicCache(config=model.config))
        torch.testing.assert_close(two_passes(model, cache), want, rtol=0, atol=1e-3)

    old.reset()
    with pytest.raises(ValueError, match="replaced after this cache was made"):
        two_passes(model, old)
    cache = KVCache(model, spec)
    check(cache)
    for layer in model.model.layers:
        layer.self_attn.k_proj.on = False
    cache.reset()
    check(cache)
    model.train()
    cache.reset()
    with pytest.raises(ValueError, match=r"the projection is a Adapter: .*eval\(\)"):
        two_passes(model, cache)
    model.eval()
    for name in ("k_proj", "v_proj"):
        merge(model, name)
    check(KVCache(model, spec))


# -- batches and texts -----------------------------------------------------------------------------


def test_no_sequences_are_refused() -> None:
    model = tiny("llama")
    cache = KVCache(model, "kivi-4bit:group=8")
    for filled in (False, True):
        if filled:
            two_passes(model, cache)
        for none in ([], torch.tensor([]), torch.zeros(2, dtype=torch.bool)):
            with pytest.raises(ValueError, match="no sequence is selected"):
                cache.batch_select_indices(none)
        with pytest.raises(ValueError, match="repeats=0"):
            cache.batch_repeat_interleave(0)
    for beyond in ([0, 2], [-3]):
        with pytest.raises(ValueError, match="of a batch of 2"):
            cache.batch_select_indices(beyond)
    assert cache.index.batch == 2 and cache.get_seq_length() == 46
    cache.batch_select_indices([-1])
    assert model(prompt(1, 3), past_key_values=cache).logits.isfinite().all()


def test_another_text_in_a_used_cache_is_told_of() -> None:
    model = tiny("llama")
    cache = KVCache(model, "kivi-4bit:group=8")
    options = {"max_new_tokens": 5, "do_sample": False, CACHE: cache}
    model.generate(prompt(1, 40), **options)
    with pytest.raises(ValueError, match="no new token: this cache holds 44 already"):
        model.generate(prompt(1, 12, seed=5), **options)
    with pytest.warns(UserWarning, match="but this cache holds 44 already: an earlier text"):
        model.generate(prompt(1, 40), **options)
    mask = torch.ones(1, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match="the attention mask covers 3 tokens, not"):
        model(prompt(1, 3), past_key_values=cache, attention_mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.reset()
        batch = left_padded([33, 9, 20])
        first = model.generate(**batch, **options)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, 5), value=1)
        model.generate(first, **options, attention_mask=mask)


# -- looking into a cache --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", IDENTITY)
@torch.no_grad()
def test_layers_show_their_keys_and_values(family: str, spec: str) -> None:
    model = tiny(family)
    cache, other = make_cache(model, spec), DynamicCache(config=model.config)
    assert cache.compressed[0].keys is None and cache.compressed[0].values is None
    for one in (cache, other):
        two_passes(model, one)
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-3, atol=1e-3)

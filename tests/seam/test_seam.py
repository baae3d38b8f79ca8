"""The seam against models that do more than most, and models that change: right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from support.method_matrix import ONE_OF_EACH as IDENTITY
from support.models import prompt, tiny
from support.unusual_models import SWITCH, built, dynamic_rope, long_rope
from xquant import KVCache
from xquant.compat import VERSION


@torch.no_grad()
def steps(model: Any, cache: Any, count: int = 30, more: int = 10) -> Tensor:
    """Logits of a prefill's last token and of each token after it."""
    ids = prompt(1, count + more)
    parts = [ids[:, :count], *(ids[:, at : at + 1] for at in range(count, count + more))]
    return torch.cat([model(p, past_key_values=cache).logits[:, -1:] for p in parts], 1)


def off(model: Any, cache: KVCache, count: int = 30, more: int = 10) -> float:
    """How far logits are from those with transformers' cache."""
    want = steps(model, DynamicCache(config=model.config), count, more)
    return float((steps(model, cache, count, more) - want).abs().max())


# -- models that use what their cache returns ------------------------------------------------------


@pytest.mark.parametrize("spec", IDENTITY)
@pytest.mark.parametrize("family", ["DiffLlama", "Doge"])
def test_a_model_that_works_with_the_returned_states_is_given_all_of_them(family: str, spec: str) -> None:
    model = built(family)
    cache = KVCache(model, spec)
    assert off(model, cache) < 1e-4
    assert f"{family}ForCausalLM works with the states" in cache.report().kernel
    assert off(model, KVCache(model, spec)) < 1e-4


@pytest.mark.parametrize("family", ["DiffLlama", "Doge"])
def test_such_a_model_is_refused_where_its_states_cannot_be_given(family: str) -> None:
    cache = KVCache(built(family), "full:group=8,tail=3", attend="store")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{family}ForCausalLM"):
            steps(cache.attachment.view.model, cache)
        assert cache.get_seq_length() == 0


def test_a_model_that_begins_to_change_the_states_is_found_out() -> None:
    """It was seen to pass them on; from then on it is given the newest alone."""
    from transformers.models.llama import modeling_llama

    model = tiny("llama")
    cache = KVCache(model, "kivi-16bit:group=8")
    steps(model, cache, 20, 2)
    own = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    def changed(name: str, default: Any) -> Callable[..., Any]:
        function = own(name, default)
        return lambda module, q, k, v, *a, **kw: function(module, q, k * 1, v, *a, **kw)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="LlamaForCausalLM"):
        patch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", changed)
        steps(model, cache, 1, 0)
    assert cache.get_seq_length() == 22


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [s for s in IDENTITY if "post" not in s and "full" not in s])
def test_frequencies_of_every_length_are_refused_before_the_first_token(spec: str) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*dynamic NTK.*rope=post"):
        KVCache(dynamic_rope(), spec)


@pytest.mark.parametrize("spec", ["full:group=8", "kivi-16bit:group=8,rope=post"])
def test_keys_after_rope_keep_the_frequencies_that_they_had(spec: str) -> None:
    # A model each: up to transformers 5.8 one keeps the frequencies of its longest text.
    model, other = dynamic_rope(), dynamic_rope()
    want = steps(other, DynamicCache(config=other.config), SWITCH - 4, 10)
    assert (steps(model, KVCache(model, spec), SWITCH - 4, 10) - want).abs().max() < 1e-4


@pytest.mark.parametrize("count", [10, SWITCH - 4, SWITCH + 8])
@pytest.mark.parametrize("spec", IDENTITY)
def test_frequencies_that_switch(spec: str, count: int) -> None:
    model = long_rope()
    assert off(model, KVCache(model, spec), count) < 1e-4


@pytest.mark.parametrize("kernel", ["auto", "folded"])
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32", "nf4:group=32,rope=pre"])
def test_kernels_read_tokens_of_both_kinds_of_frequencies(spec: str, kernel: str) -> None:
    model = long_rope()
    found = [steps(model, KVCache(model, spec, kernel=k), SWITCH, 40) for k in ("reference", kernel)]
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 5e-3


@torch.no_grad()
def test_frequencies_that_switch_back_when_tokens_are_cropped() -> None:
    model, ids = long_rope(), prompt(1, 60)
    found = []
    for cache in (DynamicCache(config=model.config), KVCache(model, "kivi-16bit:group=8")):
        model(ids[:, :40], past_key_values=cache)
        cache.crop(-20)
        parts = ids[:, 20:24], ids[:, 24:44]
        found.append(torch.cat([model(p, past_key_values=cache).logits for p in parts], 1))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    assert not cache.index.uniform
    converted = cache.converted("kivi-16bit:group=8,rope=post")
    more = [model(ids[:, :3], past_key_values=one).logits for one in (cache, converted)]
    torch.testing.assert_close(*more, rtol=0, atol=1e-4)


@pytest.mark.skipif(VERSION.release[:2] == (5, 8), reason="generate() of 5.8 does not read the text anew")
def test_a_cache_that_generate_drops_says_so() -> None:
    model = long_rope("Phi3")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    want = model.generate(prompt(1, SWITCH - 4), **options)
    cache = KVCache(model, "kivi-16bit:group=8")
    with pytest.warns(UserWarning, match=f"ran on all {SWITCH + 1} tokens anew without this cache"):
        got = model.generate(prompt(1, SWITCH - 4), past_key_values=cache, **options)
    assert torch.equal(got, want)
    assert "without this cache" in cache.report().note
    assert "without this cache" in str(cache.report())
    cache.reset()
    steps(model, cache, 5, 0)
    assert not cache.report().note


# -- models that change ----------------------------------------------------------------------------


def projections(model: nn.Module) -> list[Tensor]:
    return [layer.self_attn.k_proj.weight for layer in model.model.layers]


def add(model: Any) -> None:
    for weight in projections(model):
        weight.data += 0.1 * torch.randn_like(weight)


def exchange(model: Any) -> None:
    for weight in projections(model):
        weight.data.copy_(weight.data.flip(0))


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(prompt(), labels=prompt()).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("change", [add, exchange, train])
@pytest.mark.parametrize("spec", IDENTITY)
def test_weights_that_are_written_to(spec: str, change: Callable[[Any], None]) -> None:
    """Through ``.data``, which leaves no trace: seen by a new cache, an older one and one that is reset."""
    model = tiny("llama")
    used, made = KVCache(model, spec), KVCache(model, spec)
    assert off(model, used) < 1e-4
    change(model)
    assert off(model, made) < 1e-4
    used.reset()
    assert off(model, used) < 1e-4
    change(model)
    assert off(model, KVCache(model, spec)) < 1e-4


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32"])
def test_a_kernel_does_not_keep_weights_that_were_written_to(spec: str) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128)
    steps(model, KVCache(model, spec))
    add(model)
    found = [steps(model, KVCache(model, spec, kernel=k), 70) for k in ("auto", "reference")]
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 5e-3


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32", "full:group=8"])
def test_a_model_that_is_cast(spec: str) -> None:
    model = tiny("llama", head_dim=32)
    cache = KVCache(model, spec)
    model.to(torch.bfloat16)
    want = steps(model, KVCache(model, spec))
    assert torch.equal(steps(model, cache), want)  # while it is empty it follows
    assert cache.report().kernel == KVCache(model, spec).report().kernel
    model.float()
    with pytest.raises(ValueError, match=r"float32 states.* holds torch.bfloat16.*new cache"):
        steps(model, cache, 1, 0)
    assert cache.get_seq_length() == 40
    model.to(torch.bfloat16)
    assert steps(model, cache, 1, 0).isfinite().all()


def test_another_attention_implementation_after_the_cache_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llama", head_dim=32)
    cache = KVCache(model, "kivi-4bit:group=32")
    steps(model, cache, 70)
    kernel = cache.report().kernel
    answered: list[bool] = []
    attend = KVCache.attend

    def count(self: KVCache, *args: Any) -> Any:
        out = attend(self, *args)
        answered.append(out is not None)
        return out

    monkeypatch.setattr(KVCache, "attend", count)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        answered.clear()
        steps(model, cache, 1, 2)
        # A first pass may be spent on watching what the layers do with whole states.
        assert answered[-10:] == [True] * 10 and cache.report().kernel == kernel
    model.set_attn_implementation("flex_attention")
    assert "flex_attention" in cache.report().kernel

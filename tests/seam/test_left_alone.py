"""What others read of a model, and do with it, is the same whether or not it has compressed caches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from support.models import FAMILIES, prompt, tiny, what_is_set
from xquant import KVCache, StaticKVCache, compress, compressed, decompress, detach

SPEC = "kivi-16bit:group=8"
LONG = "kivi-16bit:group=32"


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_leaves_the_model_as_it_was(family: str) -> None:
    model, ids = tiny(family), prompt()
    before, name = what_is_set(model), model.config._attn_implementation
    with torch.inference_mode():
        want = model(ids).logits
        cache = KVCache(model, "xquant-cl-2bit:first_layers=1")
        model(ids, past_key_values=cache)
        assert torch.equal(model(ids).logits, want)
        assert model.config._attn_implementation == name
        detach(model)
        assert what_is_set(model) == before
        assert torch.equal(model(ids).logits, want)
    detach(model)


def test_a_pass_that_was_interrupted_leaves_the_name_of_the_attention() -> None:
    model = tiny("llama")
    before = what_is_set(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
    with compressed(model, SPEC), pytest.raises(KeyboardInterrupt):
        model.generate(prompt(), max_new_tokens=2)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    detach(model)
    assert what_is_set(model) == before


def test_passes_with_other_caches_follow_the_attention_that_is_set() -> None:
    model, plain = tiny("llama"), tiny("llama")
    KVCache(model, SPEC)
    for name in ("eager", "sdpa", "flex_attention", "eager"):
        for each in (model, plain):
            each.set_attn_implementation(name)
        if name != "flex_attention":  # it wants a compiler
            outs = [
                each(
                    prompt(),
                    past_key_values=DynamicCache(config=each.config),
                    output_attentions=name == "eager",
                )
                for each in (model, plain)
            ]
            assert torch.equal(outs[0].logits, outs[1].logits)
            assert (outs[0].attentions is None) == (outs[1].attentions is None)


FORMS: dict[str, Callable[[Any], Any]] = {
    "a cache": lambda model: KVCache(model, SPEC),
    "a static cache": lambda model: StaticKVCache(model, LONG, room=64),
    "compress": lambda model: compress(model, SPEC),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_an_engine_with_memory_of_its_own_runs_a_model_that_has_caches(name: str) -> None:
    model = tiny("llama", num_hidden_layers=2)
    model.set_attn_implementation(name)
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)

    def answers() -> list[list[int]]:
        asked = {"generation_config": config, "continuous_batching_config": small}
        out = model.generate_batch(inputs=[prompt(1, 20)[0].tolist()], **asked)
        return [each.generated_tokens for each in out.values()]

    want = answers()
    assert len(want[0]) == 4
    model.set_attn_implementation(name)  # engines of transformers 5.8 leave another
    for make in FORMS.values():
        cache = make(model)
        if cache is not None:
            model.generate(prompt(1, 20), past_key_values=cache, max_new_tokens=4)
    assert answers() == want  # within `compress`
    decompress(model)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_drafts_by_its_lower_layers(form: str) -> None:
    model = tiny("llama", initializer_range=0.1)
    ids, options = prompt(1, 30), {"max_new_tokens": 8, "do_sample": False}
    want = model.generate(ids, assistant_early_exit=2, **options)
    plain = model.generate(ids, **options)
    depth = model.config.num_hidden_layers
    for _ in range(2):
        cache = FORMS[form](model)
        if cache is not None:
            options["past_key_values"] = cache
        got = model.generate(ids, assistant_early_exit=2, **options)
        assert torch.equal(got, want) and model.config.num_hidden_layers == depth
    decompress(model)
    options.pop("past_key_values", None)
    assert torch.equal(model.generate(ids, **options), plain)


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_of_a_model_that_is_told_to_run_fewer_layers_is_refused(form: str) -> None:
    model = tiny("llama")
    KVCache(model, SPEC)
    model.config.num_hidden_layers = 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"had 5 layers .* and runs 2 now"):
            FORMS[form](model)
    model.config.num_hidden_layers = 5
    model.generate(prompt(), past_key_values=FORMS[form](model), max_new_tokens=2)
    decompress(model)

"""Compiled forward passes: outputs of those that are not, and nothing compiled anew as the context grows."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

from support.models import left_padded, prompt, tiny
from support.unusual_models import built
from xquant import KVCache, StaticKVCache, compressed, detach

SPEC = "kivi-4bit:group=8"


@pytest.fixture(autouse=True)
def from_scratch() -> Iterator[None]:
    """Nothing is compiled yet, and a frame that is compiled too often is an error, not run uncompiled."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def forward_alone(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@torch.no_grad()
def decoded(
    model: Any, cache: KVCache, steps: int = 20, ids: Tensor | None = None, settles: bool = True
) -> Tensor:
    """Logits of a prompt and of the steps after it. After the second, nothing may be compiled anew if it
    ``settles``."""
    ids = prompt(1, 20 + steps) if ids is None else ids
    logits = [model(ids[:, :20], past_key_values=cache).logits]
    for at in range(20, 20 + steps):
        settled = settles and at > 21 and bool(counters["stats"])
        with torch._dynamo.config.patch(error_on_recompile=settled):
            logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [wrapped, in_place, forward_alone])
def test_a_compiled_model_gives_what_it_gives_uncompiled(way: Callable[[Any], Any]) -> None:
    model = tiny("llama")
    want = decoded(model, KVCache(model, SPEC))
    detach(model)
    fast = way(model)
    cache = KVCache(fast, SPEC)
    assert torch.equal(decoded(fast, cache), want)
    assert cache.report().sealed_bytes
    # A prompt and a step, of the decoder and what follows it each: a layer is no graph of its own.
    assert counters["stats"]["unique_graphs"] == 4
    other = KVCache(fast, SPEC)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(decoded(fast, other), want)


@pytest.mark.long
@pytest.mark.parametrize(
    "family, spec, backend",
    [
        ("llama", "xquant-cl-4bit:group=8", "aot_eager"),
        ("gemma3", SPEC, "eager"),
        ("gpt_oss", "kivi-4bit:group=8,sink=2", "eager"),
    ],
)
def test_methods_and_models(family: str, spec: str, backend: str) -> None:
    model = tiny(family)
    want = decoded(model, KVCache(model, spec), steps=6)
    fast = torch.compile(model, backend=backend)
    torch.testing.assert_close(decoded(fast, KVCache(model, spec), steps=6), want, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    model = tiny("llama", num_hidden_layers=2)
    fast, ids = torch.compile(model), prompt(1, 40)
    mine, own = (KVCache(model, SPEC) for _ in range(2))
    with torch.no_grad():
        for cache in (mine, own):
            model(ids[:, :20], past_key_values=cache)
        for at in range(20, 40):
            got, want = (
                run(ids[:, at : at + 1], past_key_values=cache).logits
                for run, cache in ((fast, mine), (model, own))
            )
            torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


@pytest.mark.long
def test_generate_with_padding() -> None:
    model = tiny("llama")
    inputs = left_padded([12, 20])
    want = model.generate(**inputs, past_key_values=KVCache(model, SPEC), max_new_tokens=12)
    fast = forward_alone(model)
    got = fast.generate(**inputs, past_key_values=KVCache(model, SPEC), max_new_tokens=12)
    assert torch.equal(got, want)


@pytest.mark.long
def test_an_error_in_a_pass_leaves_the_cache_as_it_was() -> None:
    model = tiny("llama")
    fast, cache = wrapped(model), KVCache(model, SPEC)
    want = decoded(fast, KVCache(model, SPEC))
    with torch.no_grad():
        fast(prompt(1, 40)[:, :20], past_key_values=cache)
        weight = model.model.layers[2].mlp.up_proj.weight
        kept = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="NaN or infinity in the hidden states of layer 3"):
            fast(prompt(1, 40)[:, 20:21], past_key_values=cache)
        weight.copy_(kept)
        assert cache.get_seq_length() == 20
        logits = fast(prompt(1, 40)[:, 20:21], past_key_values=cache).logits
    assert torch.equal(logits, want[:, 20:21])


FORMS: dict[str, Callable[[Any], Any]] = {
    "growing": lambda model: KVCache(model, "kivi-16bit:group=32"),
    "static": lambda model: StaticKVCache(model, "kivi-16bit:group=32", room=64),
}


@pytest.mark.long
def test_threads_that_compile_at_the_same_time() -> None:
    model = tiny("llama", num_hidden_layers=1)
    fast = wrapped(model)

    def run(model: Any, cache: Any, seed: int) -> Tensor:
        # The setting that forbids compiling is one for all threads.
        return decoded(model, cache, steps=6, ids=prompt(1, 26, seed), settles=False)

    forms = [*FORMS.values(), FORMS["growing"]]
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(run, fast, f(model), seed) for seed, f in enumerate(forms)]
        found = [job.result() for job in jobs]
    for seed, logits in enumerate(found):
        want = run(model, DynamicCache(config=model.config), seed)
        torch.testing.assert_close(logits, want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_that_is_not_compiled_while_another_thread_compiles(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says of all threads that they are compiling."""
    model, ids = tiny("llama", num_hidden_layers=2), prompt(1, 30)
    want = decoded(model, FORMS[form](model), 10, ids)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.equal(decoded(model, FORMS[form](model), 10, ids), want)


@pytest.mark.long
def test_one_graph_takes_other_caches_and_refuses_ours() -> None:
    model, ids = tiny("llama", num_hidden_layers=1), prompt(1, 20)
    want = model(ids).logits
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), compressed(model, SPEC):
        for other in (None, DynamicCache(config=model.config)):
            assert torch.equal(fast(ids, past_key_values=other).logits, want)
        for make in FORMS.values():
            cache = make(model)
            for steps in (0, 10):  # empty, and filled by passes that are not compiled
                if steps:
                    decoded(model, cache, steps, prompt(1, 30))
                for _ in range(2):
                    with pytest.raises(ValueError, match=r"^a compressed cache .* fullgraph=True [^\n]*$"):
                        fast(ids[:, :1] if steps else ids, past_key_values=cache)
                assert cache.get_seq_length() == (20 + steps if steps else 0)


@pytest.mark.long
def test_one_graph_makes_no_cache_of_ours() -> None:
    model, ids = tiny("llama", num_hidden_layers=1), prompt(1, 20)
    want = model(ids).logits
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with compressed(model, SPEC):
            for given in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
                for _ in range(2):
                    with pytest.raises(ValueError, match=r"^a compressed .* fullgraph=True [^\n]*$"):
                        fast(**given, use_cache=True)
            assert torch.equal(fast(ids, use_cache=False).logits, want)
        after = fast(ids, use_cache=True)
    assert type(after.past_key_values) is DynamicCache
    assert torch.equal(after.logits, want)


@pytest.mark.long
def test_one_graph_follows_the_attention_that_is_set() -> None:
    model, ids = tiny("llama", num_hidden_layers=1), prompt(1, 20)
    KVCache(model, SPEC)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    called = []
    AttentionInterface.register("counted", lambda *a, **k: called.append(1) or sdpa(*a, **k))
    AttentionMaskInterface.register("counted", AttentionMaskInterface()["sdpa"])
    with torch.no_grad():
        want = fast(ids).logits
        model.set_attn_implementation("counted")
        assert torch.equal(fast(ids).logits, want)
    assert called


def test_what_cannot_run_compiled_is_refused() -> None:
    model = tiny("llama")
    cache = KVCache(model, SPEC)
    with pytest.raises(ValueError, match=r"gradients are recorded; .* torch.no_grad\(\)"):
        wrapped(model)(prompt(), past_key_values=cache)
    assert cache.get_seq_length() == 0
    other = built("DiffLlama")
    with pytest.raises(ValueError, match="DiffLlamaForCausalLM works with the states"):
        decoded(wrapped(other), KVCache(other, SPEC))


@pytest.mark.long
@pytest.mark.parametrize("family", ["falcon", "gemma4"])
@pytest.mark.parametrize("known", [False, True])
def test_layers_that_attend_by_themselves_are_refused_where_they_alone_are_compiled(
    family: str, known: bool
) -> None:
    """Falcon asks no attention function, so nothing of ours ran, and its logits were of new tokens alone."""
    model = tiny(family)
    cache, kept = KVCache(model, SPEC), 12 if known else 0
    with torch.no_grad():
        if known:
            model(prompt(1, 12), past_key_values=cache)
        torch.compiler.reset()
        decoder = model.base_model
        decoder.forward = torch.compile(decoder.forward, backend="eager", dynamic=True)
        for count in (13, 34, 1, 1):
            # With a past the compiler says first that the mask is longer than the states.
            with pytest.raises(Exception, match=r"^a compressed cache cannot|fake tensor call"):
                model(prompt(1, count), past_key_values=cache)
            assert cache.get_seq_length() == kept


def test_no_cuda_graph_records_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU in tests: the tag is what the compiler asks for, and a recording is pretended."""
    if hasattr(torch.Tag, "cudagraph_unsafe"):
        assert torch.Tag.cudagraph_unsafe in torch.ops.xquant.attend.default.tags
    model = tiny("llama")
    cache = KVCache(model, SPEC)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        before = cache.get_seq_length()
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="cannot be recorded in a CUDA graph"):
            model(prompt(), past_key_values=cache)
    assert cache.get_seq_length() == before


def test_a_compiled_model_with_its_own_cache() -> None:
    model = tiny("llama")
    want = model(prompt()).logits
    KVCache(model, SPEC)
    assert torch.allclose(wrapped(model)(prompt()).logits, want, atol=1e-4)

"""Converting a cache: the target holds what a prefill would have stored, or what the source reads."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.caches import calibration, make_cache
from support.examples import examples
from support.generation import generate, remove
from support.method_matrix import IDENTITY, LOW, RIVALS
from support.models import FAMILIES, left_padded, prompt, tiny
from xquant import KVCache, parse_method
from xquant.models.rotation import apply_rope, remove_rope

BATCH = left_padded([43, 17, 30])
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0}),
    "partial": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
}
States = tuple[torch.Tensor, torch.Tensor]


def filled(model: Any, spec: str, attend: str = "chunk", chunk: int = 43, kernel: str = "auto") -> KVCache:
    """A cache of the padded prompts, given in passes of ``chunk`` tokens."""
    cache, mask = make_cache(model, spec, attend, kernel), BATCH["attention_mask"]
    with torch.inference_mode():
        for ids in BATCH["input_ids"].split(chunk, 1):
            stop = cache.get_seq_length() + ids.shape[1]
            model(ids, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
    return cache


def converted(model: Any, cache: KVCache, spec: str) -> KVCache:
    return cache.converted(spec, calibration(model, spec))


def states(cache: KVCache) -> list[States]:
    with torch.inference_mode():
        return [layer.states() for layer in cache.compressed]


def going_on(model: Any, cache: KVCache, new: int = 1) -> torch.Tensor:
    """Logits of tokens after the padded prompts; no block is sealed by them."""
    mask = torch.cat([BATCH["attention_mask"], torch.ones(3, new, dtype=torch.long)], 1)
    with torch.inference_mode():
        ids = prompt(3, new, seed=8)
        return model(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits


def same(ours: list[States], theirs: list[States]) -> bool:
    return all(
        torch.equal(a, b)
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in zip(mine, other, strict=True)
    )


def near(ours: list[States], theirs: list[States], error: float) -> bool:
    pairs = ((a, b) for pair in zip(ours, theirs, strict=True) for a, b in zip(*pair, strict=True))
    return all((a - b).norm() < error * b.norm() for a, b in pairs)


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        *(("llama", spec) for spec in (*LOW, *RIVALS) if not spec.startswith("xquant")),
        *((f, s) for f in FAMILIES for s in ("kivi-3bit:group=8,sink=1", "tc-cl-2bit:group=16")),
    ],
)
def test_from_exact_states_it_is_what_one_prefill_stores(family: str, spec: str) -> None:
    model = tiny(family)
    target = filled(model, spec)
    # Rotated where the target is: codes may not differ by a rounding.
    rotated = target.compressed[0].codec.rotated
    source = filled(model, "full:group=8" if rotated else "kivi-16bit:group=8,sink=3,tail=5")
    got = converted(model, source, spec)
    assert same(states(got), states(target))
    assert got.nbytes == target.nbytes
    assert torch.equal(got.index.sink, target.index.sink)
    assert torch.allclose(going_on(model, got), going_on(model, target), atol=1e-5)


@pytest.mark.parametrize("spec", [*IDENTITY, *LOW])
@pytest.mark.parametrize("family", ["llama-mha", "gemma3"])
def test_decompressed_it_holds_what_the_source_reads(family: str, spec: str) -> None:
    model = tiny(family)
    # By torch, which reads what is stored to the last bits.
    source = filled(model, spec, chunk=13, kernel="reference")
    got = source.converted("full:group=8")
    assert same(states(got), states(source))
    assert torch.allclose(going_on(model, got), going_on(model, source), atol=1e-4)
    assert (got.get_seq_length(), source.get_seq_length()) == (44, 44)


@pytest.mark.parametrize("spec", ["tc-cl-2bit:group=16,sink=2", "kivi-2bit:group=8,sink=1,tail=9"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_sinks_and_tails_stay_exact(family: str, spec: str) -> None:
    model = tiny(family)
    full, source = filled(model, "full:group=8"), filled(model, spec)
    sink, tail = source.index.sink, source.compressed[0].tail
    assert tail is not None
    near = 4e-3 if spec.startswith("tc") else 1e-4  # sinks of 16 bits
    exact = sink | (torch.arange(43) >= 43 - tail.shape[1])
    for target in ("kivi-16bit:group=8", "full:group=8", "kivi-1bit:group=8,sink=4,tail=15"):
        got = states(converted(model, source, target))
        for ours, theirs in zip(got, states(full), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                held = (each.transpose(1, 2)[exact] for each in (a, b))
                assert torch.allclose(*held, atol=near, rtol=near)


@pytest.mark.parametrize("rope", ROPES)
def test_other_ropes_are_turned_back(rope: str) -> None:
    family, changes = ROPES[rope]
    common = {"rope_theta": 10000.0, "original_max_position_embeddings": 128}
    model = tiny(family, rope_parameters=common | changes)
    source = filled(model, "full:group=8")
    before = source.converted("kivi-16bit:group=8")
    assert near(states(before), states(source), 1e-6)
    assert near(states(before.converted("full")), states(source), 1e-6)
    want = states(filled(model, "tc-4bit:group=16"))
    assert near(states(converted(model, source, "tc-4bit:group=16")), want, 1e-2)


@settings(max_examples=examples(50), deadline=None)
@given(half=st.integers(1, 8), passed=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_unrotate_is_the_inverse_of_rotate(half: int, passed: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, angle = torch.randn(2, 7, 3, 2 * half + passed), 30 * torch.randn(2, 7, half)
    cos, sin = (1.3 * t(angle).repeat(1, 1, 2) for t in (torch.cos, torch.sin))
    assert torch.allclose(remove_rope(apply_rope(x, cos, sin), cos, sin), x, atol=1e-5)
    x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
    error = remove_rope(apply_rope(x, cos, sin), cos, sin) - x
    assert error.abs().max() <= 2**-6 * x.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("target", ["kivi-2bit:group=8,sink=1", "tc-cl-2bit:group=16", "full"])
def test_the_source_is_left_as_it_was(family: str, target: str) -> None:
    model = tiny(family)
    source = filled(model, "tc-cl-2bit:group=16,sink=1")
    before, kept, report = states(source), copy.deepcopy(source), source.report()
    got = converted(model, source, target)
    going_on(model, got)
    assert same(states(source), before)
    assert source.report() == report
    assert all(
        layer.of_pass.recalled is None and layer.of_pass.accumulated is None for layer in source.compressed
    )
    assert torch.equal(going_on(model, source), going_on(model, kept))


@pytest.mark.parametrize("spec", ["tc-cl-3bit:group=16", "kivi-4bit:group=8", "xquant-4bit:group=8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@torch.inference_mode()
def test_generation_goes_on(family: str, spec: str) -> None:
    with torch.inference_mode(False):
        model = tiny(family)
        calibration(model, spec)
    source, ids = make_cache(model, spec), prompt(2, 41)
    model(ids[:, :-1], past_key_values=source, use_cache=True)
    fast = source.converted("full:group=8")
    fast.batch_repeat_interleave(2)
    if family != "gemma3":  # a sliding window that has passed cannot be cropped
        for cache in (source, fast):
            remove(cache, 3)
    got = generate(model, fast, ids.repeat_interleave(2, 0))
    assert torch.equal(got[::2], got[1::2])
    assert got.shape == generate(model, source, ids).repeat_interleave(2, 0).shape
    assert fast.get_seq_length() == source.get_seq_length()


def test_tokens_that_were_cropped_do_not_come_back() -> None:
    model = tiny("llama")
    source = filled(model, "kivi-2bit:group=8,sink=1,rope=post", chunk=9)
    remove(source, 14)  # into a sealed block
    source.batch_select_indices(torch.tensor([2, 0]))
    got = source.converted("full:group=8")
    assert (got.get_seq_length(), got.index.batch) == (29, 2)
    assert same(states(got), states(source))


@pytest.mark.parametrize("spec", ["tc-cl-2bit:group=16,sink=2", "kivi-2bit:group=8,tail=6"])
def test_caches_that_read_the_store_alone_stay_so(spec: str) -> None:
    model = tiny("llama")
    target = "kivi-3bit:group=8"
    source = filled(model, spec, attend="store")
    got = converted(model, source, target)
    assert got.compressed[0].through_store
    tail = source.compressed[0].tail
    assert tail is not None
    sealed = 43 - tail.shape[1]
    exact = source.converted("kivi-16bit:group=8")
    for ours, theirs in zip(states(exact), states(source), strict=True):
        assert all(torch.equal(a[:, :, :sealed], b[:, :, :sealed]) for a, b in zip(ours, theirs, strict=True))
    for layer, old in zip(exact.compressed, source.compressed, strict=True):
        assert torch.equal(layer.held()[0][:, sealed:], old.tail[:, :, : layer.codec.view.kv_width])
    assert going_on(model, got).isfinite().all()


def test_by_the_same_method_it_is_a_copy() -> None:
    model = tiny("llama")
    for spec in ("kivi-2bit:group=8", "xquant-cl-2bit:group=8,first_layers=1"):
        source = filled(model, spec, chunk=9)
        got = source.converted(parse_method(spec))
        assert same(states(got), states(source))
        assert torch.equal(going_on(model, got), going_on(model, source))


@pytest.mark.parametrize("spec", ["xquant-4bit", "xquant-cl-2bit", "xquant-4bit:form=mha"])
def test_layer_inputs_cannot_be_had_from_keys_and_values(spec: str) -> None:
    source = filled(tiny("llama"), "xquant-2bit:group=8")
    with pytest.raises(ValueError, match=rf"to {spec}: it stores layer inputs"):
        source.converted(spec)


def test_an_empty_cache_stays_empty() -> None:
    model = tiny("gemma3")
    got = make_cache(model, "tc-2bit:group=16").converted("full:group=8")
    assert got.get_seq_length() == 0
    with torch.inference_mode():
        model(**BATCH, past_key_values=got, use_cache=True)
    assert same(states(got), states(filled(model, "full:group=8")))


def test_a_kernel_can_be_asked_for() -> None:
    source = filled(tiny("llama"), "tc-cl-2bit:group=16")
    assert "reference" in source.converted("kivi-4bit:group=8", kernel="reference").report().kernel
    with pytest.raises(ValueError, match="kernel"):
        source.converted("kivi-4bit:group=8", kernel="abacus")

"""Prompts, and chunks over a past that is decoded: the library's attention against the model's own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from support.caches import calibration
from support.models import left_padded, prompt, tiny
from xquant import KVCache
from xquant.kernels.call import AttentionCall
from xquant.kernels.cpu import library as native
from xquant.kernels.prompts import PromptAttention
from xquant.past.exact import torch_attention

PAST, CHUNK = 150, 70
pytestmark = pytest.mark.skipif(not native.isas(), reason="no native library")
NEAR = "kivi-16bit:group=32"
SPECS = ("tc-2bit:group=32", "tc-cl-2bit:group=32", "xquant-4bit:group=32,tail=5", NEAR)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=128)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was answered."""
    found: list[bool] = []
    own = PromptAttention.attend

    def attend(self: PromptAttention, *given: Any) -> Tensor | None:
        out = own(self, *given)
        found.append(out is not None)
        return out

    monkeypatch.setattr(PromptAttention, "attend", attend)
    return found


def begun(model: Any, spec: str, batch: int = 1, kernel: str = "auto") -> KVCache:
    """A cache with a past."""
    cache = KVCache(model, spec, kernel=kernel, calibration=calibration(model, spec))
    with torch.inference_mode():
        model(prompt(batch, PAST + CHUNK)[:, :PAST], past_key_values=cache)
    return cache


def read(model: Any, cache: KVCache, batch: int = 1, **chunk: Any) -> Tensor:
    """The logits of a chunk after it."""
    with torch.inference_mode():
        ids = prompt(batch, PAST + CHUNK)[:, PAST:]
        logits: Tensor = model(ids, past_key_values=cache, **chunk).logits
    return logits


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_chunk_reads_what_the_model_would(
    model: Any, spec: str, batch: int, answered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = begun(model, spec, batch)
    ours = read(model, copy.deepcopy(cache), batch)
    assert answered == [True] * (2 * model.config.num_hidden_layers)
    monkeypatch.setattr(PromptAttention, "attend", lambda *_: None)
    wanted = read(model, cache, batch)
    # Codes of the chunk itself may differ where a number lies between two of them.
    assert (ours - wanted).norm() / wanted.norm() < 1e-3
    assert (ours - wanted).abs().median() < 1e-4


def test_a_chunk_in_16_bits_is_as_near_to_32_bits(
    answered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128).bfloat16()
    ours = read(model, begun(model, NEAR))
    assert answered
    assert all(answered)
    assert ours.dtype == torch.bfloat16
    monkeypatch.setattr(PromptAttention, "attend", lambda *_: None)
    theirs = read(model, begun(model, NEAR))
    exact = read(model.float(), begun(model, NEAR))
    assert (ours.float() - exact).norm() < 1.2 * (theirs.float() - exact).norm()


def test_the_model_attends_itself_where_it_was_asked_for(model: Any, answered: list[bool]) -> None:
    read(model, begun(model, NEAR, kernel="reference"))
    assert not answered


def test_the_full_cache_gives_what_transformers_own_does_to_the_bit(model: Any) -> None:
    ids, own, full = prompt(1, PAST + CHUNK), DynamicCache(), KVCache(model, "full")
    for part in ids.split(PAST, 1):
        with torch.inference_mode():
            ours, theirs = (model(part, past_key_values=cache).logits for cache in (full, own))
        assert torch.equal(ours, theirs)


def test_a_mask_that_is_not_causal_is_left_to_the_model(model: Any, answered: list[bool]) -> None:
    causal = torch.ones(1, 1, CHUNK, PAST + CHUNK, dtype=torch.bool).tril(PAST)
    layers = model.config.num_hidden_layers
    for hidden in ((0, 3), (CHUNK - 1, PAST)):
        mask = causal.clone()
        mask[0, 0, *hidden] = False
        answered.clear()
        read(model, begun(model, NEAR), attention_mask=mask)
        assert answered == [True] * layers + [False] * layers
    read(model, begun(model, NEAR), attention_mask=causal)
    assert answered[-1]
    causal[0, 0, 0, 3] = False  # between two passes
    read(model, begun(model, NEAR), attention_mask=causal)
    assert not answered[-1]


def test_a_mask_that_adds_to_scores_is_left_to_the_model() -> None:
    states = torch.randn(1, 2, CHUNK, 8)
    causal = torch.zeros(1, 1, CHUNK, CHUNK).masked_fill(
        ~torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    adding, now = causal.clone(), PromptAttention(torch_attention)

    def attend(call: AttentionCall) -> Tensor | None:
        return now.attend(call, now)

    adding[0, 0, 5, 3] = -1.0
    call = AttentionCall(states, states, states, causal, 1.0, None)
    assert attend(call) is not None
    assert attend(call._replace(mask=adding)) is None
    assert attend(call._replace(mask=causal[..., :1])) is None


def test_gradients_go_back_through_a_prompt(model: Any, answered: list[bool]) -> None:
    ids = prompt(1, CHUNK)
    model(ids, past_key_values=KVCache(model, "kivi-4bit:group=32")).logits.sum().backward()
    assert answered == [False] * model.config.num_hidden_layers
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(ids, use_cache=False).logits.sum().backward()
    for ours, parameter in zip(found, model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, atol=1e-4)
    model.zero_grad()


def test_padding_is_left_to_the_model(model: Any, answered: list[bool]) -> None:
    inputs = left_padded([PAST + CHUNK, PAST + CHUNK - 20])
    cache = KVCache(model, NEAR)
    with torch.inference_mode():
        whole = model(**inputs, use_cache=False).logits
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        model(ids[:, :PAST], attention_mask=mask[:, :PAST], past_key_values=cache)
        out = model(ids[:, PAST:], attention_mask=mask, past_key_values=cache)
    assert answered and not any(answered)
    assert torch.allclose(out.logits, whole[:, PAST:], atol=1e-4)

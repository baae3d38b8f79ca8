"""Chunks of a prompt over a past that is decoded: torch's flash attention against the model's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration
from support.models import left_padded, prompt, tiny
from xquant import KVCache
from xquant.contents import stack
from xquant.kernels.torch.chunks import ChunkAttention

PAST, CHUNK = 150, 70
SPECS = ("tc-2bit:group=32", "tc-cl-2bit:group=32", "xquant-4bit:group=32,tail=5", "full:group=32")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=128)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was answered."""
    found: list[bool] = []
    own = ChunkAttention.attend

    def attend(self: ChunkAttention, *given: Any) -> Tensor | None:
        out = own(self, *given)
        found.append(out is not None)
        return out

    monkeypatch.setattr(ChunkAttention, "attend", attend)
    return found


def read(model: Any, spec: str, batch: int = 1, **chunk: Any) -> Tensor:
    """The logits of a chunk after a past."""
    cache, ids = KVCache(model, spec, calibration=calibration(model, spec)), prompt(batch, PAST + CHUNK)
    with torch.inference_mode():
        model(ids[:, :PAST], past_key_values=cache)
        logits: Tensor = model(ids[:, PAST:], past_key_values=cache, **chunk).logits
    return logits


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_chunk_reads_what_the_model_would(
    model: Any, spec: str, batch: int, answered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = read(model, spec, batch)
    assert answered == [True] * model.config.num_hidden_layers
    monkeypatch.setattr(stack, "chunks_of", lambda *_: None)
    wanted = read(model, spec, batch)
    assert len(answered) == model.config.num_hidden_layers
    # Codes of the chunk itself may differ where a number lies between two of them.
    assert (ours - wanted).norm() / wanted.norm() < 1e-3
    assert (ours - wanted).abs().median() < 1e-4


def test_a_chunk_in_16_bits_is_as_near_to_32_bits(
    answered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128).bfloat16()
    ours = read(model, "full:group=32")
    assert answered
    assert all(answered)
    assert ours.dtype == torch.bfloat16
    monkeypatch.setattr(stack, "chunks_of", lambda *_: None)
    theirs, exact = read(model, "full:group=32"), read(model.float(), "full:group=32")
    assert (ours.float() - exact).norm() < 1.2 * (theirs.float() - exact).norm()


def test_the_model_attends_itself_where_it_was_asked_for(model: Any, answered: list[bool]) -> None:
    cache, ids = KVCache(model, "full:group=32", kernel="reference"), prompt(1, PAST + CHUNK)
    with torch.inference_mode():
        for part in ids.split(PAST, 1):
            model(part, past_key_values=cache)
    assert not answered


def test_a_mask_that_is_not_causal_is_left_to_the_model(model: Any, answered: list[bool]) -> None:
    causal = torch.ones(1, 1, CHUNK, PAST + CHUNK, dtype=torch.bool).tril(PAST)
    for hidden in ((0, 3), (CHUNK - 1, PAST)):
        mask = causal.clone()
        mask[0, 0, *hidden] = False
        read(model, "full:group=32", attention_mask=mask)
    assert answered == [False] * (2 * model.config.num_hidden_layers)
    read(model, "full:group=32", attention_mask=causal)
    assert answered[-1]


def test_padding_is_left_to_the_model(model: Any, answered: list[bool]) -> None:
    inputs = left_padded([PAST + CHUNK, PAST + CHUNK - 20])
    cache = KVCache(model, "full:group=32")
    with torch.inference_mode():
        whole = model(**inputs, use_cache=False).logits
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        model(ids[:, :PAST], attention_mask=mask[:, :PAST], past_key_values=cache)
        out = model(ids[:, PAST:], attention_mask=mask, past_key_values=cache)
    assert answered and not any(answered)
    assert torch.allclose(out.logits, whole[:, PAST:], atol=1e-4)

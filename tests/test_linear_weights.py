"""Packed weights: the outputs of ordinary ones, which can be had back."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from support.models import pickled, prompt, saved, tiny
from xquant import KVCache, pack_weights, unpack_weights
from xquant.linear import PackedLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


def packed(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model = tiny(family).to(dtype)
    pack_weights(model)
    return model


def names_packed(model: nn.Module) -> set[str]:
    modules = model.named_modules()
    return {name.split(".")[-1] for name, m in modules if isinstance(m, PackedLinear)}


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3"])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-4), (torch.bfloat16, 0.0)])
def test_outputs_are_those_of_ordinary_weights(family: str, dtype: torch.dtype, close: float) -> None:
    ids = prompt(2, 9)
    want = tiny(family).to(dtype)(ids).logits
    torch.testing.assert_close(packed(family, dtype)(ids).logits, want, rtol=0, atol=close)


def test_what_methods_read_is_not_packed() -> None:
    names = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert names_packed(packed()) == names
    assert names_packed(packed("deepseek_v3")).isdisjoint({"kv_a_proj_with_mqa", "kv_b_proj"})


@torch.no_grad()
def test_caches_work_as_before() -> None:
    model = tiny("llama")
    cache = KVCache(model, "xquant-16bit:group=8")
    ids = prompt(1, 30)
    want = model(ids, past_key_values=cache).logits
    nbytes = cache.report().model_bytes
    pack_weights(model)
    again = KVCache(model, "xquant-16bit:group=8")
    torch.testing.assert_close(model(ids, past_key_values=again).logits, want, rtol=0, atol=1e-4)
    model(ids[:, :1], past_key_values=cache)  # those that hold tokens, too
    assert again.report().model_bytes == nbytes
    pack_weights(model)
    unpack_weights(model)
    assert not names_packed(model)
    assert torch.equal(model(ids).logits, tiny("llama")(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy])
def test_packed_models_are_copied(way: Callable[[Any], Any]) -> None:
    model = packed()
    assert torch.equal(way(model)(prompt()).logits, model(prompt()).logits)


@torch.no_grad()
def test_packed_models_are_saved_as_ordinary_ones(tmp_path: Path) -> None:
    model, plain = packed(), tiny("llama")
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(prompt()).logits, plain(prompt()).logits)


@torch.no_grad()
def test_a_cast_packs_anew_and_what_cannot_be_packed_is_refused() -> None:
    model = packed().to(torch.bfloat16)
    want = tiny("llama").to(torch.bfloat16)(prompt()).logits
    assert torch.equal(model(prompt()).logits, want)
    for to in (torch.float16, "meta"):
        with pytest.raises(ValueError, match=r"unpack_weights\(model\) first"):
            packed().lm_head.to(to)


def test_gradients_of_inputs() -> None:
    layers = packed().lm_head, tiny("llama").lm_head
    x = torch.randn(3, 48)
    found = []
    for layer in layers:
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_packed_weights_compile() -> None:
    torch._dynamo.reset()
    model = packed()
    want = model(prompt(1, 5)).logits
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(prompt(1, 5)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)

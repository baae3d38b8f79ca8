"""Packed weights: the outputs of ordinary ones, which can be had back, and in fewer bits of rounded ones."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from support.models import pickled, prompt, saved, tiny
from xquant import KVCache, load_model, pack_weights, unpack_weights
from xquant.linear import onednn
from xquant.linear.layer import PackedLinear
from xquant.load import packaged_gguf
from xquant.models import view_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
BFLOAT16 = pytest.mark.skipif(bool(onednn.why_not(torch.bfloat16)), reason="no AVX-512")
EACH = pytest.mark.parametrize("bits", [None, 4, 8])
CLOSE = 1e-3
"""Of logits, what rounding rows to 15 bits makes of the norm."""
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def packed(family: str = "llama", dtype: torch.dtype = torch.float32, bits: int | None = None) -> Any:
    model = tiny(family, **WIDE).to(dtype)
    pack_weights(model, bits)
    return model


def plain(bits: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """A model without packed weights whose numbers are those of packed ones."""
    model = packed(dtype=dtype, bits=bits)
    unpack_weights(model)
    return model


def names_packed(model: nn.Module) -> set[str]:
    modules = model.named_modules()
    return {name.split(".")[-1] for name, m in modules if isinstance(m, PackedLinear)}


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3"])
@pytest.mark.parametrize(
    "dtype, close", [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 0.0, marks=BFLOAT16)]
)
def test_outputs_are_those_of_ordinary_weights(family: str, dtype: torch.dtype, close: float) -> None:
    ids = prompt(2, 9)
    want = tiny(family, **WIDE).to(dtype)(ids).logits
    torch.testing.assert_close(packed(family, dtype)(ids).logits, want, rtol=0, atol=close)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("bits, loss", [(4, 0.8), (8, 0.08)])
def test_outputs_in_fewer_bits_are_those_of_rounded_weights(family: str, bits: int, loss: float) -> None:
    ids, model = prompt(2, 9), packed(family, bits=bits)
    found, exact = model(ids).logits, tiny(family, **WIDE)(ids).logits
    unpack_weights(model)
    assert not names_packed(model)
    assert (found - model(ids).logits).norm() < CLOSE * exact.norm()
    assert CLOSE * exact.norm() < (found - exact).norm() < loss * exact.norm()


@pytest.mark.long
@pytest.mark.smollm2
def test_the_packaged_model_has_the_codes_of_its_file() -> None:
    plain, stored = (load_model("smollm2", weights=weights)[0] for weights in ("dense", "as-stored"))
    for ours, theirs in zip(stored.modules(), plain.modules(), strict=True):
        if isinstance(theirs, nn.Linear):
            assert isinstance(ours, PackedLinear)
            assert torch.equal(ours.weight, theirs.weight)
    codes = sum(m.packed.nbytes for m in stored.modules() if isinstance(m, PackedLinear))
    assert codes < packaged_gguf().stat().st_size < codes + 4e6


def test_what_cannot_be_kept_as_it_is_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights are one of dense, as-stored, 4, 8, not 'int4'"):
        load_model("smollm2", weights="int4")
    with pytest.raises(ValueError, match=r"is not read from a file of 4 bits.*pack_weights\(model, bits=4\)"):
        load_model(str(tmp_path), weights="as-stored")
    with pytest.raises(ValueError, match="in 4 or 8 bits, not in 3"):
        pack_weights(tiny("llama"), bits=3)


def test_what_methods_read_is_packed_in_fewer_bits_alone() -> None:
    names = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert names_packed(packed()) == names
    assert names_packed(packed(bits=4)) == names | {"k_proj", "v_proj"}
    assert names_packed(packed("deepseek_v3")).isdisjoint({"kv_a_proj_with_mqa", "kv_b_proj"})
    assert not names_packed(packed(bits=4)) & names_packed(tiny("llama"))


@torch.no_grad()
@EACH
@pytest.mark.parametrize(
    "spec", ["xquant-16bit:group=8", "kivi-16bit:group=8", "xquant-cl-16bit:group=8,first_bits=16"]
)
def test_caches_work_as_before(bits: int | None, spec: str) -> None:
    model = plain(bits)
    cache = KVCache(model, spec)
    ids = prompt(1, 30)
    want = model(ids, past_key_values=cache).logits
    nbytes = cache.report().model_bytes
    pack_weights(model, bits)
    again = KVCache(model, spec)
    assert (model(ids, past_key_values=again).logits - want).norm() < CLOSE * want.norm()
    model(ids[:, :1], past_key_values=cache)  # those that hold tokens, too
    assert (again.report().model_bytes == nbytes) == (bits is None)
    unpack_weights(model)
    assert not names_packed(model)
    assert torch.equal(model(ids).logits, plain(bits)(ids).logits)


@torch.no_grad()
@EACH
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_a_packed_model_is_seen_as_what_it_was(family: str, bits: int | None) -> None:
    model = packed(family, bits=bits)
    found = view_model(model)
    unpack_weights(model)
    for ours, theirs in zip(found.layers, view_model(model).layers, strict=True):
        assert (ours.key_module, ours.key_norm) == (theirs.key_module, theirs.key_norm)
        assert (ours.unknown_keys, ours.unknown_values) == ("", "")


@torch.no_grad()
@EACH
@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy])
def test_packed_models_are_copied(way: Callable[[Any], Any], bits: int | None) -> None:
    model = packed(bits=bits)
    assert torch.equal(way(model)(prompt()).logits, model(prompt()).logits)


@torch.no_grad()
@EACH
def test_packed_models_are_saved_as_ordinary_ones(tmp_path: Path, bits: int | None) -> None:
    model, ordinary = packed(bits=bits), plain(bits)
    assert model.state_dict().keys() == ordinary.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(prompt()).logits, ordinary(prompt()).logits)


def test_bfloat16_is_refused_where_onednn_multiplies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = tiny("llama").to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"multiplies no bfloat16 on this CPU.*float32, or"):
        pack_weights(model)
    assert not names_packed(model)
    with pytest.raises(ValueError, match="multiplies no bfloat16 on this CPU"):
        packed().to(torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("bits", [pytest.param(None, marks=BFLOAT16), 4, 8])
def test_a_cast_packs_anew_and_what_cannot_be_packed_is_refused(bits: int | None) -> None:
    model = packed(bits=bits).to(torch.bfloat16)
    want = plain(bits).to(torch.bfloat16)(prompt()).logits
    loss = (model(prompt()).logits - want).norm() / want.norm()
    assert loss == 0 if bits is None else loss < 0.1  # codes stay, ordinary weights are rounded to bfloat16
    for to in ("meta", torch.float16) if bits is None else ("meta", torch.float64):
        with pytest.raises(ValueError, match=r"unpack_weights\(model\) first"):
            packed(bits=bits).lm_head.to(to)


@EACH
def test_gradients_of_inputs(bits: int | None) -> None:
    layers = packed(bits=bits).lm_head, plain(bits).lm_head
    x = torch.randn(3, WIDE["hidden_size"])
    found = []
    for layer in layers:
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found)


@pytest.mark.long
@torch.no_grad()
@EACH
def test_packed_weights_compile(bits: int | None) -> None:
    torch._dynamo.reset()
    model = packed(bits=bits)
    want = model(prompt(1, 5)).logits
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(prompt(1, 5)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)

"""What an engine refuses before a model is loaded, in one line."""

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    StableLmConfig,
)

from support.models import tiny
from xquant.methods import Method
from xquant.serve import fit
from xquant.serve.build import Model
from xquant.serve.chunk import ChunkCoder

SERVED = [
    "full",
    "kivi-4bit",
    "kivi-2bit:rope=post",
    "kivi-4bit:group=32,sink=2",
    "int8",
    "nf4",
    "asymkv-2bit",
]


@pytest.mark.parametrize("spec", SERVED)
def test_methods_that_keep_states_are_served(spec: str) -> None:
    method = fit.parse(spec)
    for family in ("llama", "llama-mha", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"):
        fit.check_model(fit.Wanted(method), Model(tiny(family).config, torch.float32))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("kivi-4bits", "kivi"),
        ("no-such-method", "unknown method"),
        (4, "spec string, not int"),
        ("kivi-4bit:sink=129", "129 sinks are more than the 128 tokens"),
        ("kivi-4bit:group=24", "multiple of 32"),
    ],
)
def test_specs_are_refused(spec: Any, why: str) -> None:
    _one_line(why, fit.parse, spec)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("xquant-4bit:form=mha", "layer inputs"),
        ("xquant-cl-2bit", "docs/at-rest.md"),
        ("crosslayer:tail=0", "share codes"),
    ],
)
def test_methods_are_refused_for_a_model(spec: str, why: str) -> None:
    method = fit.parse(spec)
    _one_line(why, _check, method, tiny("llama").config)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "granitemoehybrid"])
def test_states_beside_attention_are_served_and_are_no_chunks(family: str) -> None:
    wanted, model = fit.Wanted(fit.parse("kivi-4bit")), Model(tiny(family).config, torch.float32)
    assert model.has_states and fit.check_model(wanted, model)
    assert fit.check_model(wanted, model, stored=True)
    _one_line("chunks have no states", ChunkCoder, model, wanted, 128)


def test_models_are_refused() -> None:
    method = fit.parse("kivi-4bit")
    alone = tiny("gemma3", layer_types=["sliding_attention"] * 5).config
    _one_line("no full-attention layer to compress", _check, method, alone)
    shape = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    shape |= {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0}
    _check(method, GptOssConfig(**shape, num_local_experts=2))  # sinks that are learned are served
    # So are heads of unequal size.
    _check(method, Gemma4TextConfig(**shape, global_head_dim=32, num_kv_shared_layers=0))
    _one_line("GPT2", _check, method, GPT2Config(n_layer=1, n_embd=32))


def test_keys_that_are_turned_in_pairs_are_served_after_rope() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
    own = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    pairs, halves = CohereConfig(**sizes, **own), StableLmConfig(**sizes, **own)
    for method in (fit.parse("kivi-4bit"), fit.parse("xquant-4bit:form=gqa")):
        _one_line("does not rotate halves", _check, method, pairs)
    _check(fit.parse("kivi-4bit:rope=post"), pairs)
    _check(fit.parse("kivi-4bit"), halves)  # of a part of a head


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"xquant_attend": "codes"}, "xquant_attend is chunk or store, not 'codes'"),
        ({"xquant_kernels": "auto"}, "no option 'xquant_kernels': one of xquant, xquant_attend"),
        ({"Xquant_attend": "chunk"}, "no option 'Xquant_attend'"),
        ({"xquant": None}, "no method, xquant=SPEC"),
        ({"xquant": ""}, "unknown method ''"),
        ({"xquant_calibration": 3}, "the name of a file, not 3"),
        ({"xquant": "asymkv-2bit", "xquant_attend": "store"}, "no recent tokens"),
    ],
)
def test_options_are_refused(options: dict[str, Any], why: str) -> None:
    _one_line(why, fit.wanted, {"xquant": "kivi-4bit", **options})


def test_options_without_a_method_are_refused() -> None:
    _one_line("no method, xquant=SPEC .xquant_attend.", fit.wanted, {"xquant_attend": "store"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"paths": "x"}, "no option 'paths'"),
        ({}, "needs the 'path'"),
        ({"path": 3}, "needs the 'path'"),
        ({"path": "x", "method": None}, "spec string, not NoneType"),
        ({"path": "x", "limit": None}, "is no size"),
        ({"path": "x", "calibration": 3}, "'calibration' is the name of a file, not 3"),
    ],
)
def test_options_of_a_connector_are_refused(options: dict[str, Any], why: str) -> None:
    _one_line(why, fit.connector_options, options, fit.Wanted(fit.parse("kivi-4bit")))


def _check(method: Method, config: Any) -> None:
    fit.check_model(fit.Wanted(method), Model(config, torch.float32))


def _one_line(why: str, call: Any, *args: Any) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        call(*args)
    assert str(refused.value).startswith("xquant: ")
    assert "\n" not in str(refused.value)

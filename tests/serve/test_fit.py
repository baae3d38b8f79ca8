"""What an engine refuses before a model is loaded, in one line."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config

from models import tiny
from xquant.serve import fit

SERVED = [
    "full",
    "kivi-4bit",
    "kivi-2bit:rope=post",
    "kivi-4bit:group=32",
    "int8",
    "nf4",
    "asymkv-2bit:tail=0",
]


@pytest.mark.parametrize("spec", SERVED)
def test_methods_that_keep_states_are_served(spec: str) -> None:
    method = fit.parse(spec)
    for family in ("llama", "llama-mha", "qwen2", "qwen3", "phi3"):
        fit.check_model(method, tiny(family).config, torch.float32)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("kivi-4bits", "kivi"),
        ("no-such-method", "unknown method"),
        (4, "spec string, not int"),
        ("kivi-4bit:sink=2", "no room for sinks"),
        ("kivi-4bit:tail=128", "no room for recent tokens"),
        ("kivi-4bit:group=24", "multiple of 32"),
        ("tc-2bit:sink=0,tail=0", "calibration"),
        ("tc-2bit", "no room for sinks"),
        ("kvquant-3bit-1%:sink=0", "calibration"),
    ],
)
def test_specs_are_refused(spec: Any, why: str) -> None:
    _one_line(why, fit.parse, spec)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("xquant-4bit", "layer inputs"),
        ("xquant-cl-2bit", "docs/at-rest.md"),
        ("crosslayer:tail=0", "share codes"),
        ("kvquant-3bit-1%:datatype=nf,scales=online,sink=0", "differ in size"),
    ],
)
def test_methods_are_refused_for_a_model(spec: str, why: str) -> None:
    method = fit.parse(spec)
    _one_line(why, fit.check_model, method, tiny("llama").config, torch.float32)


def test_models_are_refused() -> None:
    method = fit.parse("kivi-4bit")
    _one_line("sliding window", fit.check_model, method, tiny("gemma3").config, torch.float32)
    _one_line("GPT2", fit.check_model, method, GPT2Config(n_layer=1, n_embd=32), torch.float32)


def test_shards_must_not_cut_ranges() -> None:
    config = tiny("llama").config
    fit.check_model(fit.parse("full"), config, torch.float32, shards=2)
    _one_line(
        "tensor parallelism", fit.check_model, fit.parse("kivi-4bit"), config, torch.float32, 2
    )


def _one_line(why: str, call: Any, *args: Any) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        call(*args)
    assert str(refused.value).startswith("xquant: ")
    assert "\n" not in str(refused.value)

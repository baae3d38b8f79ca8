"""Learned logits of sinks (gpt-oss), one more term of the softmax, in every backend on the CPU."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.attention_cases import Case, decoding_error, error, filled, tolerance_of
from support.examples import examples
from support.models import prompt, tiny
from xquant import KVCache
from xquant.kernels.call import AttentionCall
from xquant.kernels.cpu import library as native

PATHS = (*native.isas(), "folded")
SPECS = [
    "kivi-4bit:group=32,sink=3,tail=9",
    "kivi-2bit:group=32,rope=post",
    "nf3-gs32:group=32,keys=channel,rope=pre",
    "xquant-4bit:group=32,sink=2",
    "xquant-3bit:group=64,form=mha,tail=40",
    "tc-2bit:group=32,sink=1",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_they_count_in_the_softmax(spec: str, path: str) -> None:
    case = Case(spec, path=path, sink_logits=1.0, tokens=400, layers=1)
    assert error(case, filled(case)) < tolerance_of(case.spec)
    case = Case(spec, path=path, batch=3, queries=4, tokens=203, mask="bool", group_heads=4)
    cache = filled(case)
    without = error(case, cache)
    case.sink_logits = 1.0
    assert error(case, cache) < max(2 * without, 1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("height", [-200.0, -10.0, 10.0, 30.0])
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32,sink=2", "xquant-4bit:group=32"])
@torch.no_grad()
def test_they_may_be_of_any_height(spec: str, height: float, path: str) -> None:
    case = Case(spec, path=path, mask="float", batch=2, sink_logits=height, softcap=5.0)
    assert error(case, filled(case)) < tolerance_of(case.spec)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "xquant-4bit:group=32"])
@torch.no_grad()
def test_a_query_that_sees_no_token_gets_nothing(spec: str, mask: str, path: str) -> None:
    """As in transformers, where all its weight is on the sink."""
    case = Case(spec, path=path, batch=2)
    cache = filled(case)
    query, key = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 1, 32)
    given = torch.zeros(2, 1, 1, cache.index.length, dtype=torch.bool)
    given[1] = True
    if mask == "float":
        given = torch.zeros(given.shape).masked_fill(~given, torch.finfo(torch.float32).min)
    for logits in (torch.ones(4), torch.full((4,), -torch.inf)):
        found = cache.attend(0, AttentionCall(query, key, key, given, 0.2, None, logits))
        assert found is not None
        assert (found[0] == 0).all() and (found[1] != 0).any()


@pytest.mark.parametrize("path", PATHS)
def test_a_call_without_them_follows_one_with(path: str) -> None:
    case = Case("kivi-4bit:group=32", path=path, layers=1, sink_logits=3.0)
    cache = filled(case)
    assert error(case, cache) < tolerance_of(case.spec)
    case.sink_logits = None
    assert error(case, cache) < tolerance_of(case.spec)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_cost_their_own_rounding_only(dtype: torch.dtype, path: str) -> None:
    least = {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    case = Case("kivi-4bit:group=32,sink=1", path=path, dtype=dtype, batch=2, sink_logits=1.0)
    assert error(case, filled(case)) < 2 * least


@pytest.mark.parametrize("path", PATHS)
def test_others_are_left_to_the_reference(path: str) -> None:
    """Such that are not one number a query head."""
    cache = filled(Case("kivi-4bit:group=32", path=path))
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32)
    for logits in (torch.ones(1), torch.ones(4, 1), torch.ones(1, 4, 1, 1)):
        assert cache.attend(0, AttentionCall(q, k, k, None, 0.2, None, logits)) is None


@settings(max_examples=examples(30), deadline=None)
@given(
    spec=st.sampled_from([spec for spec in SPECS if not spec.startswith("xquant")]),
    head_size=st.sampled_from([32, 64, 96]),
    kv_heads=st.integers(1, 3),
    group_heads=st.integers(1, 9),
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    tokens=st.integers(8, 300),
    path=st.sampled_from(PATHS),
    mask=st.sampled_from(["none", "bool", "float"]),
    softcap=st.sampled_from([None, 5.0]),
    sink_logits=st.sampled_from([-5.0, 0.0, 3.0, 8.0]),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_any_shape_agrees(**drawn: Any) -> None:
    case = Case(**drawn, layers=1)
    assert error(case, filled(case)) < tolerance_of(case.spec)


def test_gpt_oss_is_read_natively() -> None:
    model = tiny("gpt_oss", head_dim=32, hidden_size=128)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-2, 4)
    assert decoding_error(model, "kivi-4bit:group=32,sink=2", "auto", [90, 61], steps=3) < 1e-3
    cache = KVCache(model, "kivi-4bit:group=32")
    with torch.no_grad():
        for ids in prompt(1, 70).split([69, 1], 1):
            model(ids, past_key_values=cache, use_cache=True)
    assert cache.kernel == native.isas()[0]

"""The CUDA kernel, on the CPU (emulated.h), against exact attention over what the store decodes to."""

import copy
from typing import Any

import pytest
import torch

from kernels.cuda.emulation import emulate, needs_a_compiler, split_for
from support.attention_cases import DEVICE, TOLERANCE, Case, error, filled
from support.models import tiny
from xquant import KVCache

pytestmark = [needs_a_compiler, pytest.mark.cases(1)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        emulate(monkeypatch)


def case(spec: str, **options: Any) -> Case:
    given = {"path": "cuda", "layers": 1, "tokens": 300, "head_size": 64, "kv_heads": 1}
    return Case(spec, **{**given, **options})


@pytest.mark.parametrize(
    "spec",
    [
        *(f"kivi-{bits}bit:group=64" for bits in (2, 4, 8)),
        *(f"kivi-{bits}bit:group=64,rope=post" for bits in (2, 4, 8)),
        "kivi-4bit:group=64,key_bits=2,value_bits=1",
        "kivi-4bit:group=128,sink=3,tail=9",
        "kivi-2bit:group=64,sink=1,rope=post,key_bits=4",
        "int4:group=64",
        "int8:group=32",
    ],
)
def test_every_layout_is_read_right(spec: str) -> None:
    one = case(spec, mask="bool", batch=2, kv_heads=2)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 3},  # causal among themselves
        {"group_heads": 5, "queries": 2},  # more rows than a tile has
        {"group_heads": 9, "queries": 2, "tokens": 80},  # and than a program
        {"group_heads": 1, "kv_heads": 2},
        {"softcap": 5.0, "mask": "float", "batch": 3, "sink_logits": 1.0},
        {"head_size": 128, "spec": "kivi-2bit:group=128,key_bits=1", "tokens": 700},
        {"head_size": 128, "spec": "kivi-4bit:group=128,rope=post,tail=200", "tokens": 900},
        {"tokens": 20},  # nothing is sealed
        {"tokens": 65, "queries": 5, "mask": "float"},  # queries are sealed
    ],
)
def test_every_shape_is_read_right(options: dict[str, Any]) -> None:
    one = case(**{"spec": "kivi-4bit:group=64,sink=2", **options})
    assert error(one, filled(one)) < 2 * TOLERANCE  # the fewer bits, the more a rounding is of a state


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_splits_are_combined(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_for(monkeypatch, slots)
    one = case("kivi-4bit:group=64", tokens=850)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_cost_their_own_rounding_only(dtype: torch.dtype) -> None:
    least = {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for spec in ("kivi-4bit:group=64,sink=1", "int4:group=64"):
        one = case(spec, dtype=dtype, mask="float")
        assert error(one, filled(one)) < 2 * least


def test_it_follows_what_happens_to_the_batch() -> None:
    one = case("kivi-4bit:group=64,sink=2", batch=2)
    cache = filled(one)
    cache.crop(-70)  # into a sealed block
    assert error(one, cache) < TOLERANCE
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    one.batch = 3
    assert error(one, copy.deepcopy(cache)) < TOLERANCE


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("kivi-3bit:group=64", "codes of 3 bits"),
        ("kivi-4bit:group=96", "blocks of 96"),
        ("nf4:group=64", "codes of a table"),
        ("xquant-4bit:group=64", "keys are rebuilt"),
        ("kivi-4bit:group=32", "whole heads"),
        ("int4:group=64,rope=pre", "ranges per token of keys before RoPE"),
    ],
)
def test_what_it_does_not_read_is_said(spec: str, why: str) -> None:
    model = tiny("llama", head_dim=64, hidden_size=128)
    with pytest.raises(ValueError, match=f"kernel 'cuda' cannot be used: .*{why}"):
        KVCache(model, spec, kernel="cuda")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the layer is on cpu"):
        KVCache(tiny("llama", head_dim=64, hidden_size=128), "kivi-4bit:group=64", kernel="cuda")


def test_values_that_average_out_keep_their_digits() -> None:
    """Of many tokens that weigh the same: offsets in codes would cost the sum its digits."""
    one = case("kivi-4bit:group=128,rope=post", head_size=128, tokens=4000, group_heads=1)
    cache = filled(one)
    assert error(one, cache) < 2 * TOLERANCE

"""The Triton kernels that read ranked codes, in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

import interpreted
from attending import TOLERANCE, Case, decoding_error, error, filled
from models import tiny
from xquant.kernels.triton import launch

interpreted.mend()


def case(spec: str, **options: Any) -> Case:
    """Of one layer, where nothing else is said."""
    return Case(spec, **{"path": "triton", "layers": 1, "tokens": 75, **options})


@pytest.mark.parametrize("bits", ["0.5", "1", "1.5", "2", "3.5", "8"])
def test_every_width_is_read_right(bits: str) -> None:
    one = case(f"tc-{bits}bit:group=32,sink=2", batch=2, queries=2, mask="bool")
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 3, "kv_heads": 3},  # causal among themselves; heads one by one
        {"softcap": 5.0, "mask": "float", "batch": 3, "sink_logits": 1.0},
        {"group_heads": 9, "queries": 4, "kv_heads": 1, "head_size": 64},
        {"spec": "tc-2bit:group=96", "tokens": 210, "head_size": 96, "kv_heads": 1},
        {"spec": "tc-3bit:group=32,basis=head", "group_heads": 1},
        {"spec": "tc-2bit:group=32,basis=keys-first", "batch": 2, "queries": 2},
        {"tokens": 20},  # nothing is sealed
        {"tokens": 33, "queries": 5, "mask": "float"},  # queries are sealed
    ],
)
def test_every_shape_is_read_right(options: dict[str, Any]) -> None:
    one = case(**{"spec": "tc-2bit:group=32,sink=2", "tokens": 110, **options})
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("count", [1, 100])
def test_splits_are_combined(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: count)
    one = case("tc-1bit:group=32", tokens=140)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_cost_their_own_rounding_only(dtype: torch.dtype) -> None:
    least = {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    one = case("tc-2bit:group=32,sink=1", dtype=dtype, mask="float")
    # The reference rounds decoded states, keys and values to this type, which the kernels do not.
    assert error(one, filled(one)) < 6 * least


def test_it_follows_what_happens_to_the_batch() -> None:
    one = case("tc-2bit:group=32,sink=2", batch=2, tokens=110)
    cache = filled(one)
    cache.crop(-17)  # into a sealed block
    assert error(one, cache) < TOLERANCE
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    one.batch = 3
    assert error(one, copy.deepcopy(cache)) < TOLERANCE


def test_models_decode_as_with_the_reference() -> None:
    options = {"num_hidden_layers": 2, "initializer_range": 0.05}
    model = tiny("qwen2", head_dim=32, hidden_size=128, **options)
    assert decoding_error(model, "tc-2bit:group=32,sink=1", "triton", [40, 21], steps=2) < 5e-3

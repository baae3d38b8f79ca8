"""The Triton kernels that read ranked codes, in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from hypothesis import given, settings
from hypothesis import strategies as st

import interpreted
from attending import DEVICE, TOLERANCE, Case, decoding_error, error, filled
from kernels.test_sealing import not_torch
from models import tiny
from xquant.kernels.triton import BACKEND, launch, support
from xquant.quant.quantizer import dense
from xquant.quant.ranked import Ranked, allot, steps_of

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


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    channels=st.integers(1, 70),
    tokens=st.sampled_from([7, 16, 48, 128]),
    bits=st.integers(0, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_decoding_is_that_of_torch_and_touches_no_other_column(
    channels: int, tokens: int, bits: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (4 * torch.rand(channels, generator=generator) - 2)
    x = torch.randn(3, tokens, channels, generator=generator) * size
    counts = allot([size.square().sort(descending=True).values], bits * channels)[0]
    quantizer = Ranked(steps_of(size.square()).to(torch.int16), counts)
    packed = quantizer.encode(x, None)
    rows = torch.full((3, tokens, channels + 5), 7.0, dtype=dtype)
    expected = rows.clone()
    quantizer.decode(packed, expected[..., 3:-2])
    packed = {name: dense(packed, name).to(DEVICE) for name in packed}
    rows = rows.to(DEVICE)
    with not_torch(quantizer):
        BACKEND.packer.unpack(quantizer, packed, rows[..., 3:-2])
    if (
        dtype == torch.bfloat16 and support.interpreted()
    ):  # the interpreter cuts off what it cannot hold
        torch.testing.assert_close(rows.cpu(), expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(rows.cpu(), expected)

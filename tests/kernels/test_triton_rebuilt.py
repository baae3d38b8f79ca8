"""The Triton kernels that rebuild keys and values, in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from hypothesis import given, settings
from hypothesis import strategies as st

from support import triton_interpreter
from support.attention_cases import DEVICE, TOLERANCE, Case, decoding_error, error, filled
from support.examples import examples
from support.models import prompt, tiny
from xquant import KVCache, attach
from xquant.kernels.triton import matrices
from xquant.kernels.triton.device import Slots
from xquant.kernels.triton.jit.unpack import TILE
from xquant.kernels.triton.matrices import PackedStates, by_chunk
from xquant.kernels.triton.operand import Layout

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()


def case(spec: str, **options: Any) -> Case:
    """Of one layer, where nothing else is said."""
    return Case(spec, **{"path": "triton", "layers": 1, "tokens": 75, **options})


@pytest.mark.parametrize("form", ["mha", "gqa"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_is_rebuilt_right(form: str, bits: int) -> None:
    one = case(f"xquant-{bits}bit:group=32,form={form},sink=2", batch=2, queries=2, mask="bool")
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(
    "spec",
    [
        "xquant-cl-4bit:group=32,form=gqa,sink=1",
        "xquant-cl-3bit:group=32,form=mha,sink=2,tail=7",
        "xquant-cl-2bit:group=32,form=mha,stream=post,first_layers=1",
        "xquant-cl-2bit:group=32,form=gqa,accumulator=4,rotate=true,sink=1",
        "xquant-cl-2bit:group=32,form=gqa,first_bits=3",  # ranges of 27 channels: summed by torch
    ],
)
def test_sums_over_layers_are_read_right(spec: str) -> None:
    heads = 5 if "first_bits" in spec else 2
    one = case(spec, layers=4, batch=2, mask="float", tokens=110, group_heads=heads)
    assert error(one, filled(one)) < TOLERANCE


def test_a_sum_of_one_layer_is_normalized_too() -> None:
    one = case("xquant-cl-4bit:group=32,form=mha", layers=3)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 3},  # causal among themselves
        {
            "group_heads": 9,
            "queries": 8,
            "kv_heads": 1,
            "head_size": 64,
        },  # more rows than a run has
        {"softcap": 5.0, "mask": "float", "batch": 3, "sink_logits": 1.0},
        {
            "head_size": 96,
            "kv_heads": 3,
            "group_heads": 12,
            "spec": "xquant-3bit:group=96,form=gqa",
        },
        {
            "head_size": 96,
            "kv_heads": 3,
            "group_heads": 12,
            "spec": "xquant-5bit:group=96,form=mha",
        },
        {
            "head_size": 128,
            "kv_heads": 1,
            "group_heads": 8,
            "spec": "xquant-4bit:group=64,form=gqa",
        },
        {"tokens": 20},  # nothing is sealed
        {"tokens": 33, "queries": 5, "mask": "float"},  # queries are sealed
        {"spec": "xquant-4bit:group=32,form=gqa,tail=40,rotate=true"},
    ],
)
def test_every_shape_is_rebuilt_right(options: dict[str, Any]) -> None:
    one = case(**{"spec": "xquant-4bit:group=32,sink=2", "tokens": 130, **options})
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("spec", ["xquant-4bit:group=32,form=gqa", "xquant-cl-4bit:group=32"])
def test_splits_are_combined(spec: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "of", lambda *args, **constants: count)
    one = case(spec, tokens=170, layers=3)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["xquant-4bit:group=32,form=gqa,sink=1", "xquant-cl-4bit:group=32,form=gqa"])
def test_half_precision_states_cost_their_own_rounding_only(spec: str, dtype: torch.dtype) -> None:
    least = {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    one = case(spec, dtype=dtype, mask="float", layers=5 if "cl" in spec else 1)
    # The reference rounds rebuilt keys and values to this type, which the kernels do not.
    assert error(one, filled(one)) < 6 * least


@pytest.mark.long
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("xquant-4bit:group=32,sink=2", marks=pytest.mark.long),
        "xquant-cl-4bit:group=32,sink=2",
    ],
)
def test_it_follows_what_happens_to_the_batch(spec: str) -> None:
    one = case(spec, batch=2, tokens=140, layers=3)
    cache = filled(one)
    cache.crop(-17)  # into a sealed block
    assert error(one, cache) < TOLERANCE
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    one.batch = 3
    assert error(one, copy.deepcopy(cache)) < TOLERANCE
    cache.crop(-(cache.index.length - 3))
    assert error(one, cache) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("qwen2", "xquant-4bit:group=32,sink=1"),
        ("qwen3", "xquant-cl-4bit:group=32,sink=1"),
        ("llama-mha", "xquant-cl-4bit:group=32,sink=1"),
    ],
)
def test_models_decode_as_with_the_reference(family: str, spec: str) -> None:
    options = {"num_hidden_layers": 4, "initializer_range": 0.05}
    model = tiny(family, head_dim=32, hidden_size=128, **options)
    assert decoding_error(model, spec, "triton", [40, 21], steps=2) < 5e-3


@pytest.mark.parametrize("form", ["mha", "gqa"])
def test_sums_go_from_layer_to_layer_in_one_memory(form: str) -> None:
    cache = filled(case(f"xquant-cl-2bit:group=32,form={form},sink=1,stream=post", layers=5))
    cache.finish()
    base, *above = cache.compressed[2:]
    base.accumulate()
    assert base.of_pass.accumulated is not None
    memory, expected = base.of_pass.accumulated.data_ptr(), base.of_pass.accumulated.clone()
    for layer in above:
        rows = layer.stream.read(expected.dtype, layer.stream.tokens)
        expected = layer.sinks.placed(layer.codec.recall(rows, expected), layer.sinks.rows)
        layer.accumulate()
        recalled = layer.of_pass.accumulated if layer.codec.feeds_above else layer.recall()
        assert recalled is not None and recalled.data_ptr() == memory
        assert float((recalled - expected).norm() / expected.norm()) < TOLERANCE
    assert base.of_pass.accumulated is None


@pytest.mark.long
def test_codes_do_not_depend_on_what_came_with_them() -> None:
    model = tiny("llama", head_dim=32, hidden_size=128, num_hidden_layers=4).to(DEVICE)
    spec, ids = "xquant-cl-2bit:group=32,form=gqa,sink=1", prompt(2, 128).to(DEVICE)
    caches = [KVCache(model, spec, kernel="triton") for _ in range(2)]
    states = torch.randn(4, 2, 128, 128, device=DEVICE)
    for cache, cuts in zip(caches, ([128], [40, 64, 24]), strict=True):
        for part in range(len(cuts)):
            start, stop = sum(cuts[:part]), sum(cuts[: part + 1])
            positions = torch.arange(start, stop, device=DEVICE).expand(2, -1)
            cache.index.append(positions, torch.ones_like(ids[:, start:stop], dtype=torch.bool))
            for layer, x in zip(cache.compressed, states, strict=True):
                layer.append_rows(x[:, start:stop])
            cache.finish()
    for one, other in zip(*(cache.compressed for cache in caches), strict=True):
        assert one.stream.blocks == other.stream.blocks == 8
        for ours, theirs in zip(one.stream.pool, other.stream.pool, strict=True):
            for name in ours:
                own, others = ours[name][one.stream.table], theirs[name][other.stream.table]
                assert torch.equal(own, others)


@settings(deadline=None, max_examples=examples(30))
@given(bits=st.integers(1, 8), tile=st.sampled_from([32, 64, 96, 160, 256]), tiles=st.integers(1, 3))
def test_a_matrix_meets_its_codes(bits: int, tile: int, tiles: int) -> None:
    states = PackedStates(tile, Layout(bits, False, True, TILE.value, tile, 0))
    order = states.order()
    assert sorted(order[order >= 0].tolist()) == list(range(tile))
    assert len(order) % min(matrices.CHUNK, tile) == 0
    weight = torch.randn(5, tile * tiles)
    matrix = by_chunk(weight, states)
    whole = (matrix.data.float() * matrix.units[:, None]).unflatten(1, (tiles, -1))
    restored = torch.zeros(5, tiles, tile).index_add_(2, order.clamp(min=0), whole.masked_fill(order < 0, 0))
    assert torch.allclose(restored.flatten(1), weight, rtol=2**-10, atol=1e-6)
    assert not whole[..., order < 0].any()


@pytest.mark.parametrize(
    ("spec", "family", "why"),
    [
        ("xquant-16bit:group=32", "llama", "no affine codes"),
        ("xquant-4bit:group=32,form=gqa,outlier=true", "llama", "no affine codes"),
        ("xquant-4bit:group=48,form=mha", "llama", "blocks of 48"),
        ("tc-2bit:group=32", "llama", "needs a calibration"),
    ],
)
def test_what_it_does_not_rebuild_is_said(spec: str, family: str, why: str) -> None:
    model = tiny(family, head_dim=32, hidden_size=128).to(DEVICE)
    with pytest.raises(ValueError, match=why):
        KVCache(model, spec, kernel="triton")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_key_norm_is_known_by_its_gain(family: str) -> None:
    model = tiny(family)
    view = attach(model).view.compressed[0]
    norm: Any = view.key_norm
    torch.nn.init.normal_(norm.weight)
    found = view.key_gain()
    assert found is not None
    gain, epsilon = found
    x = torch.randn(7, view.head_size) * 0.01
    ours = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gain
    assert torch.allclose(ours, norm(x), rtol=1e-4, atol=1e-6)
    view.key_norm = torch.nn.LayerNorm(view.head_size)
    assert view.key_gain() is None

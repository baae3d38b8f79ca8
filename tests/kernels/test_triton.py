"""The Triton kernels, in Triton's interpreter, against exact attention over what the store decodes to."""

import copy
from itertools import permutations
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from support import triton_interpreter
from support.attention_cases import (
    DEVICE,
    STRIDES,
    TOLERANCE,
    TOLERANCES,
    Case,
    decoding_error,
    error,
    exact,
    filled,
    laid,
)
from support.models import tiny
from xquant import KVCache
from xquant.kernels.call import FLOATS, AttentionCall
from xquant.kernels.triton import support
from xquant.kernels.triton.device import Slots

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()


LAYOUTS = [
    *(f"kivi-{bits}bit:group=32" for bits in range(1, 9)),
    *(f"kivi-{bits}bit:group=32,rope=post" for bits in (2, 3, 4, 8)),
    "kivi-4bit:group=64,sink=3,tail=9",
    "kivi-2bit:group=32,sink=1,rope=post,key_bits=3,value_bits=1",
    "int4:group=32",
    "int4-gs16:group=32,rope=pre",
    "int3-gs32:group=64,keys=channel",
    "int2:group=32,keys=channel,values=channel",
    "int2-gs32:group=64,keys=channel,values=channel",
    "nf3-gs32:group=32,keys=channel,rope=pre",
    "nf5:group=32",
    "kvquant-3bit-1%:group=32",
    "kvquant-3bit:group=32,scales=offline",
    "kvquant-2bit-10%:group=64,datatype=int,scales=online,rope=post",
]


def case(spec: str, **options: Any) -> Case:
    """Of one layer, where nothing else is said."""
    return Case(spec, **{"path": "triton", "layers": 1, "tokens": 75, **options})


@pytest.mark.parametrize("spec", LAYOUTS)
def test_every_layout_is_read_right(spec: str) -> None:
    one = case(spec, batch=2, queries=2, mask="bool")
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize(
    "spec", ["asymkv-1.5bit:tail=3", "crosslayer:tail=0,km=0,vm=0,kq=2,vq=0", "crosslayer:tail=2"]
)
def test_layers_may_differ_in_width_and_share_codes(spec: str) -> None:
    one = case(spec, layers=4)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 3},  # causal among themselves
        {"group_heads": 9, "queries": 8, "kv_heads": 1},  # more rows than a program has
        {"softcap": 5.0, "mask": "float", "batch": 3, "sink_logits": 1.0},
        {"head_size": 96, "kv_heads": 1, "spec": "kivi-3bit:group=96,sink=1", "tokens": 210},
        {"head_size": 96, "kv_heads": 3, "spec": "kivi-2bit:group=128", "tokens": 130},
        {"head_size": 256, "kv_heads": 1, "spec": "kivi-4bit:group=32,rope=post"},
        {"head_size": 128, "kv_heads": 1, "spec": "kvquant-3bit-1%:group=64"},
        {"kv_heads": 9, "head_size": 32, "spec": "kvquant-3bit-5%:group=32"},  # wide counts
        {"head_size": 96, "kv_heads": 2, "spec": "kvquant-3bit-5%:group=96", "tokens": 210},
        {"tokens": 20},  # nothing is sealed
        {"tokens": 33, "queries": 5, "mask": "float"},  # queries are sealed
    ],
)
def test_every_shape_is_read_right(options: dict[str, Any]) -> None:
    one = case(**{"spec": "kivi-4bit:group=32,sink=2", **options})
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("count", [1, 3, 100])
def test_splits_are_combined(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "of", lambda *args, **constants: count)
    one = case("kivi-4bit:group=32", kv_heads=1, tokens=170)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_cost_their_own_rounding_only(dtype: torch.dtype) -> None:
    least = {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for spec in ("kivi-4bit:group=32,sink=1", "kivi-4bit:group=32,rope=post"):
        one = case(spec, dtype=dtype, mask="float")
        assert error(one, filled(one)) < 2 * least


@pytest.mark.parametrize("dtypes", list(permutations(FLOATS, 3))[::2])
def test_states_of_several_dtypes_are_read_right(dtypes: tuple[torch.dtype, ...]) -> None:
    """As under autocast; the query's is that of the result."""
    cache = filled(case("kivi-4bit:group=32,sink=2"))
    states = [torch.randn(1, heads, 1, 32, device=DEVICE) for heads in (4, 2, 2)]
    given = (x.to(dtype) for x, dtype in zip(states, dtypes, strict=True))
    query, key, value = (laid(x, how) for x, how in zip(given, STRIDES[1:], strict=False))
    found = cache.attend(0, AttentionCall(query, key, value, None, 32**-0.5, None))
    assert found is not None and found.dtype == query.dtype
    keys, values, _ = cache.answer(0, key, value, None)
    want = exact(query, keys, values, None, None)
    assert (found.double() - want).norm() < TOLERANCES[query.dtype] * want.norm()
    with pytest.raises(ValueError, match="a kernel wants a value "):
        cache.attend(0, AttentionCall(query, key, value[..., :16], None, 1.0, None))


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32,sink=2", "kvquant-3bit-1%:group=32"])
def test_it_follows_what_happens_to_the_batch(spec: str) -> None:
    one = case(spec, batch=2, tokens=140, kv_heads=1)
    cache = filled(one)
    cache.crop(-17)  # into a sealed block
    assert error(one, cache) < TOLERANCE
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    one.batch = 3
    other = copy.deepcopy(cache)
    assert error(one, other) < TOLERANCE
    cache.crop(-(cache.index.length - 3))
    assert error(one, cache) < TOLERANCE


def test_positions_that_jump_are_left_to_plain_torch() -> None:
    cache = filled(case("kivi-4bit:group=32"))
    cache.index.positions[:, 40:] += 7
    cache.index.epoch += 1
    q, k = (torch.randn(1, heads, 1, 32, device=DEVICE) for heads in (4, 2))
    assert cache.attend(0, AttentionCall(q, k, k, None, 0.2, None)) is None


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_models_decode_as_with_the_reference(family: str) -> None:
    options = {} if family == "gemma2" else {"num_hidden_layers": 2}
    model = tiny(family, head_dim=32, hidden_size=128, initializer_range=0.05, **options)
    assert decoding_error(model, "kivi-4bit:group=32,sink=1", "triton", [40, 21], steps=2) < 5e-3


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("kivi-4bit:group=24", "blocks of 24"),
        ("kivi-4bit:group=2048", "more than a program holds"),
        ("full:group=32", "nothing is packed"),
    ],
)
def test_what_it_does_not_read_is_said(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"kernel 'triton' cannot be used: .*{why}"):
        KVCache(tiny("llama", head_dim=32, hidden_size=128), spec, kernel="triton")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU, and no interpreter")
def test_it_needs_a_gpu_or_the_interpreter_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128)
    assert KVCache(model, "kivi-4bit:group=32", kernel="triton").report().kernel.startswith("triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="the layer is on cpu"):
        KVCache(model, "kivi-4bit:group=32", kernel="triton")
    monkeypatch.setattr(support, "installed", lambda: False)
    with pytest.raises(ValueError, match="Triton is not installed"):
        KVCache(model, "kivi-4bit:group=32", kernel="triton")


def test_a_triton_that_is_too_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # where there is a GPU, too; no kernel runs
    monkeypatch.setattr(support, "outdated", lambda: "3.2.0")
    with pytest.raises(ValueError, match=r"Triton 3\.2\.0 is too old: 3\.5 or later is needed"):
        KVCache(model, "kivi-4bit:group=32", kernel="triton")
    assert "triton" not in KVCache(model, "kivi-4bit:group=32").kernel

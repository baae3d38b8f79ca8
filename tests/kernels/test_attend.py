"""The kernels against exact attention over what the store decodes to."""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calibrated import calibration
from models import left_padded, prompt, tiny
from xquant import KVCache
from xquant.kernels import folded, native
from xquant.methods import Seen

PATHS = (*native.paths(), "folded")
TOLERANCE = 1e-3

PER_BITS = [
    f"kivi-{bits}bit:group={group}{rope}"
    for bits, group in ((1, 32), (2, 64), (3, 32), (4, 128), (5, 32), (6, 64), (7, 32), (8, 32))
    for rope in ("", ",rope=post")
]
OTHERS = [
    "kivi-4bit:group=64,sink=3,tail=40",
    "kivi-2bit:group=32,sink=1,rope=post,key_bits=3,value_bits=1",
    "int4:group=32",
    "int4-gs16:group=32,rope=pre",
    "int3-gs32:group=64,keys=channel",
    "int2:group=32,keys=channel,values=channel",
    "int8-gs32:group=32,values=token,rope=pre,sink=2",
    "nf4:group=32",
    "nf3-gs32:group=32,keys=channel,rope=pre",
    "nf2:group=32,values=channel",
    "asymkv-1.5bit:tail=3",
    "crosslayer:tail=0,km=0,vm=0,kq=2,vq=0",
    "kvquant-3bit-5%:group=32,datatype=nf,scales=online",
    "kvquant-2bit-10%:group=64,datatype=int,scales=online,rope=post",
]

# The native kernels do not read these.
FOLDED_ONLY = [
    ("kivi-4bit:group=8,sink=2,tail=5", 32),
    ("kivi-3bit:group=10,rope=post", 24),
    ("kivi-8bit:group=32", 24),
    ("int4-gs24:group=32", 32),
    ("int2-gs24:group=32,keys=channel,values=channel", 64),
    ("int4-gs128:group=32,rope=post", 96),
    ("nf5:group=32", 32),
]

REBUILT = [
    "xquant-4bit:group=32",
    "xquant-3bit:group=64,sink=3,tail=40",
    "xquant-1bit:group=128,rotate=true",
    "xquant-2bit:group=32,form=mha",
    "xquant-8bit:group=32,form=mha,rotate=true,sink=1",
]

# Their keys are rebuilt by torch.
REBUILT_BY_TORCH = [
    "xquant-4bit:group=32,outlier=true,rotate=true",
    "xquant-4bit:group=40",
    "xquant-16bit:group=32",
    "xquant-cl-2bit:group=32",
    "xquant-cl-3bit:group=64,form=mha,sink=2,tail=7,first_layers=2",
    "xquant-cl-2bit:group=32,rotate=true,accumulator=8,stream=residual,first_layers=1",
]


def outliers(spec: str) -> bool:
    """Whether some are stored apart, which the folded kernel leaves to the reference."""
    return spec.startswith("kvquant")


@dataclass
class Case:
    spec: str
    head_size: int = 32
    kv_heads: int = 2
    group_heads: int = 2
    batch: int = 1
    queries: int = 1
    tokens: int = 150
    path: str = PATHS[0]
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    mask: str = "none"
    seed: int = 0
    layers: int = 4


def filled(case: Case) -> KVCache:
    """A cache with random states, appended in uneven pieces."""
    heads = case.kv_heads * case.group_heads
    model = tiny(
        "llama",
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_size,
        hidden_size=8 * heads,
    ).to(case.dtype)
    cache = KVCache(model, case.spec, calibration=calibration(model, case.spec), kernel=case.path)
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    real = torch.ones(case.batch, case.tokens, dtype=torch.bool)
    if case.mask != "none":
        padding = torch.randint(0, case.tokens // 2, (case.batch, 1), generator=generator)
        real = torch.arange(case.tokens) >= padding
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cuts = [0, case.tokens // 3, case.tokens - case.queries, case.tokens]
    for start, stop in pairwise(cuts):
        cache.index.append(positions[:, start:stop], real[:, start:stop])
        for layer in cache.compressed:
            count = stop - start
            key = random(case.batch, case.kv_heads, count, case.head_size)
            # Some channels are much larger than others, and off centre, as keys are.
            wide, middle = (
                torch.linspace(0.3, 2, case.head_size),
                torch.linspace(-1, 1, case.head_size),
            )
            key = key * wide + middle
            key = key.to(case.dtype)
            value = random(case.batch, case.kv_heads, count, case.head_size)
            x = random(case.batch, count, 8 * case.kv_heads * case.group_heads)
            layer.append(Seen(x, x, key.transpose(1, 2).flatten(2), key, value))
    return cache


def mask_for(case: Case, cache: KVCache) -> Tensor | None:
    if case.mask == "none":
        return None
    tokens, queries = cache.index.length, case.queries
    causal = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    seen = cache.index.real[:, None, None] & causal
    if case.mask == "bool":
        return seen
    return torch.zeros(seen.shape, dtype=case.dtype).masked_fill(~seen, torch.finfo(case.dtype).min)


def exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention in fp64: ``[B, t, H, D]``."""
    repeats, queries, tokens = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (t.double().repeat_interleave(repeats, 1) for t in (key, value))
    scores = query.double() @ key.mT * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    if mask.dtype != torch.bool:
        mask = mask == 0
    scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2)


def error(case: Case, cache: KVCache) -> float:
    """The largest relative error of a layer's attention."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (case.batch, case.kv_heads * case.group_heads, case.queries, case.head_size)
    wide = torch.randn((*shape[:3], case.head_size + 3), generator=generator).to(case.dtype)
    query = wide[..., 3:]  # neither contiguous nor aligned
    new = torch.randn(
        2, case.batch, case.queries, case.kv_heads, case.head_size, generator=generator
    )
    key, value = new.to(case.dtype).transpose(2, 3)
    mask, worst = mask_for(case, cache), 0.0
    scaling = case.head_size**-0.5
    for layer in cache.compressed:
        index = layer.codec.view.index
        found = cache.attend(index, query, key, value, mask, scaling, case.softcap)
        assert found is not None and found.dtype == case.dtype
        keys, values, seen = cache.answer(index, key, value, mask)
        want = exact(query, keys, values, seen, case.softcap)
        worst = max(worst, float((found.double() - want).norm() / want.norm()))
    cache.finish()
    return worst


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("spec", PER_BITS + OTHERS)
def test_every_layout_is_read_right(spec: str, path: str) -> None:
    if path == "folded" and outliers(spec):
        pytest.skip("outliers are stored apart")
    case = Case(spec, path=path)
    assert error(case, filled(case)) < TOLERANCE
    case = Case(spec, path=path, batch=3, queries=4, tokens=203, mask="bool", group_heads=3)
    assert error(case, filled(case)) < TOLERANCE


@pytest.mark.parametrize(("spec", "head_size"), FOLDED_ONLY)
@pytest.mark.parametrize("queries", [1, 5])
def test_plain_torch_reads_more(spec: str, head_size: int, queries: int) -> None:
    case = Case(spec, head_size=head_size, kv_heads=3, queries=queries, path="folded")
    assert error(case, filled(case)) < TOLERANCE
    case.batch, case.mask, case.softcap = 3, "float", 5.0
    assert error(case, filled(case)) < TOLERANCE


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        *((spec, path) for spec in REBUILT for path in PATHS),
        *((spec, "folded") for spec in REBUILT_BY_TORCH),
    ],
)
@torch.no_grad()
def test_keys_are_rebuilt_right(spec: str, path: str) -> None:
    case = Case(spec, path=path)
    assert error(case, filled(case)) < TOLERANCE
    case = Case(spec, path=path, batch=3, queries=4, tokens=203, mask="bool", group_heads=4)
    cache = filled(case)
    assert error(case, cache) < TOLERANCE
    cache.crop(-17)
    cache.batch_select_indices(torch.tensor([1, 0, 1, 2]))
    case.batch, case.mask, case.softcap = 4, "float", 5.0
    assert error(case, cache) < TOLERANCE


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_many_chunks_are_joined(rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "CHUNK", 1)
    case = Case(f"kivi-4bit:group=32,sink=3,rope={rope}", batch=2, mask="bool", path="folded")
    case.tokens, case.queries = 290, 3
    cache = filled(case)
    cache.crop(-9)
    assert error(case, cache) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_size", [32, 96])
def test_ranges_end_inside_a_head(head_size: int, path: str) -> None:
    case = Case("kivi-2bit:group=64", head_size, kv_heads=3, queries=2, tokens=64, path=path)
    if head_size == 96:
        case.spec = "kivi-2bit:group=128"  # 288 channels in three ranges
    assert error(case, filled(case)) < TOLERANCE


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(PER_BITS + OTHERS),
    head_size=st.sampled_from([32, 64, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    group_heads=st.integers(1, 9),
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    tokens=st.integers(8, 300),
    path=st.sampled_from(PATHS),
    mask=st.sampled_from(["none", "bool", "float"]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_agrees(**drawn: Any) -> None:
    case = Case(**drawn)
    if case.spec.startswith("int4-gs16") and case.head_size % 16:
        return
    if case.path == "folded" and outliers(case.spec):
        return
    if "group=64" in case.spec and case.kv_heads * case.head_size == 288 and case.path != "folded":
        return  # five ranges of 58 channels
    assert error(case, filled(case)) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
def test_half_precision_states_cost_their_own_rounding_only(path: str) -> None:
    for dtype, least in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        for spec in ("kivi-4bit:group=32,sink=1", "kivi-4bit:group=32,rope=post"):
            case = Case(spec, path=path, dtype=dtype, mask="float", batch=2)
            assert error(case, filled(case)) < 2 * least


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32,sink=2", "kvquant-3bit-1%:group=32"])
def test_it_follows_what_happens_to_the_batch(spec: str, path: str) -> None:
    if path == "folded" and outliers(spec):
        spec = "nf4:group=32,sink=2"
    case = Case(spec, batch=2, tokens=140, path=path)
    cache = filled(case)
    cache.crop(-17)  # into a sealed block
    assert error(case, cache) < TOLERANCE
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    case.batch = 3
    assert error(case, cache) < TOLERANCE
    other = copy.deepcopy(cache)
    assert error(case, other) < TOLERANCE
    other.crop(-40)
    del other
    assert error(case, cache) < TOLERANCE
    cache.crop(-(cache.index.length - 3))
    assert error(case, cache) < TOLERANCE


def test_positions_that_jump_are_left_to_plain_torch() -> None:
    for path in PATHS:
        case = Case("kivi-4bit:group=32", path=path)
        cache = filled(case)
        cache.index.positions[:, 40:] += 7
        cache.index.epoch += 1
        cache.index.forget_rope()
        if path == "folded":
            assert error(case, cache) < TOLERANCE
        else:
            q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32)
            assert cache.attend(0, q, k, k, None, 0.2, None) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_models_decode_as_with_the_reference(family: str, path: str) -> None:
    model = tiny(family, head_dim=32, hidden_size=128, initializer_range=0.05)
    batch = left_padded([90, 41, 70])
    logits = []
    for kernel in ("reference", path):
        cache = KVCache(model, "kivi-4bit:group=32,sink=1", kernel=kernel)
        with torch.inference_mode():
            ids, mask = batch["input_ids"], batch["attention_mask"]
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            for step in range(40):
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                ids = prompt(3, 1, seed=step)
                out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert kernel in cache.report().kernel
        logits.append(out.logits)
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 5e-3

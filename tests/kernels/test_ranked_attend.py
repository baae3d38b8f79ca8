"""Attention on ranked codes by the library, against exact attention over what they decode to."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.attention_cases import NARROW_TOLERANCE, TOLERANCE, Case, decoding_error, error, filled
from support.examples import examples
from support.models import tiny
from xquant import KVCache
from xquant.kernels.cpu import library as native
from xquant.kernels.cpu.ranked import RankedKernel, zipped
from xquant.methods.transform import TransformCodec
from xquant.quant import Ragged
from xquant.quant.ranked import Ranked
from xquant.quant.trellis import WIDTHS

PATHS = native.isas()
pytestmark = pytest.mark.skipif(not PATHS, reason="no native library, or no CPU for it")
paths = st.sampled_from(PATHS or ("none",))
specs = st.builds(
    "tc-{}bit:basis={},group={},sink={},tail={}".format,
    st.sampled_from([0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8]),
    st.sampled_from(["keys-first", "joint"]),
    st.sampled_from([32, 48, 64, 128]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([0, 30]),
)


@settings(max_examples=examples(40), deadline=None)
@given(
    spec=specs,
    head_size=st.sampled_from([8, 24, 32, 40, 64, 80, 96, 128]),
    kv_heads=st.integers(1, 3),
    group_heads=st.integers(1, 9),
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    tokens=st.integers(8, 300),
    path=paths,
    mask=st.sampled_from(["none", "bool", "float"]),
    softcap=st.sampled_from([None, 5.0]),
    sink_logits=st.sampled_from([None, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_agrees(**drawn: Any) -> None:
    case = Case(**drawn)
    try:
        cache = filled(case)
    except ValueError as refused:  # half a bit is less than the scales of few channels take
        assume("take more bits" not in str(refused))
        raise
    assert error(case, cache) < tolerance(cache)


def tolerance(cache: KVCache) -> float:
    return NARROW_TOLERANCE if narrow_channels(cache) else 2 * TOLERANCE


def narrow_channels(cache: KVCache) -> int:
    """With codes of 3 bits and fewer, which are multiplied in 8 bits."""
    narrow = 0
    for layer in cache.compressed:
        of_keys = layer.codec.segments[0].quantizer
        assert isinstance(of_keys, Ranked)
        counts = zip(WIDTHS, of_keys.counts, strict=True)
        narrow += sum(count for width, count in counts if width.bits <= 4)
    return narrow


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("bits", "head_size"), [(1, 64), (2, 64)])
@pytest.mark.parametrize("seed", range(4))
def test_products_of_8_bits_cost_little(bits: int, head_size: int, seed: int, path: str) -> None:
    """With heads and contexts as models have them; `NARROW_TOLERANCE` is for the worst of any shape."""
    size = {"head_size": head_size, "kv_heads": 3, "group_heads": 9, "tokens": 300}
    case = Case(f"tc-{bits}bit:group=128", path=path, seed=seed, **size)
    cache = filled(case)
    assert narrow_channels(cache) > 200  # more than a group of columns a layer
    assert error(case, cache) < 0.012


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("turned", [0.25, 0.5, 0.75])
def test_rope_may_turn_a_part_of_a_head(turned: float, path: str) -> None:
    case = Case("tc-8bit:group=32", turned=turned, path=path, batch=2, mask="bool", queries=3)
    cache = filled(case)
    angles = cache.index.rope(torch.empty(0))[0]
    still = (angles == 1).all((0, 1)).sum() / 32
    assert cache.compressed[0].codec.view.rotary_size == 32 and still == 1 - turned
    assert error(case, cache) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_cost_their_own_rounding_only(dtype: torch.dtype, path: str) -> None:
    case = Case("tc-3bit:group=32", path=path, dtype=dtype, mask="float", batch=2)
    assert error(case, filled(case)) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("path", PATHS)
def test_any_number_of_threads_finds_the_same_scores(path: str) -> None:
    case = Case("tc-2bit:group=32", path=path, batch=2, tokens=290, group_heads=3)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        assert error(case, filled(case)) < NARROW_TOLERANCE
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", PATHS)
def test_sums_at_their_limit_do_not_overflow(path: str) -> None:
    cache = filled(Case("tc-8bit:group=32", path=path, kv_heads=3, group_heads=4))
    layer = cache.compressed[0]
    codec, stream = layer.codec, layer.stream
    assert isinstance(codec, TransformCodec) and stream.table is not None
    codec.key_weight.fill_(0.5)
    codec.prepared.clear()
    (quantizer,) = (s.quantizer for s in codec.segments)
    assert isinstance(quantizer, Ranked) and sum(quantizer.counts) > 64
    quantizer.usual.zero_()
    for name in ("codes", "scale"):  # the highest levels of channels that are alike
        fields = stream.pool[0][name]
        assert not isinstance(fields, Ragged)
        for slab in fields.slabs:
            slab.fill_(255)
    case = Case("tc-8bit:group=32", kv_heads=3, group_heads=4)
    assert error(case, cache) < TOLERANCE


def test_zipping_two_rows_by_128_bits_pairs_their_channels_in_order() -> None:
    a, b = (zipped(torch.arange(64) + first).view(2, 4, 2, 4) for first in (0, 100))
    low, high = (torch.stack([a[:, :, i], b[:, :, i]], -1).flatten(1) for i in (0, 1))
    pairs = torch.cat([low, high], 1).view(64, 2)
    assert torch.equal(pairs, torch.stack([torch.arange(64), torch.arange(64) + 100], 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "gemma2", "phi3"])
def test_models_decode_as_with_the_reference(family: str, path: str) -> None:
    model = tiny(family)
    assert decoding_error(model, "tc-8bit:group=32,sink=1", path, [90, 41, 70], steps=20) < 8e-3


@pytest.mark.parametrize("path", PATHS)
def test_weights_of_other_channels_never_reach_the_library(path: str) -> None:
    layer = filled(Case("tc-3bit:group=32", path=path)).compressed[0]
    codec = layer.codec
    assert isinstance(codec, TransformCodec)
    RankedKernel(codec, layer.stream.block, path)
    codec.key_weight = codec.key_weight[:, :-1]
    with pytest.raises(ValueError, match="a kernel wants"):
        RankedKernel(codec, layer.stream.block, path)

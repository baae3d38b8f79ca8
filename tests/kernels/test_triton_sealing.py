"""Sealing by Triton, in its interpreter, against the quantizers in torch: the same bits."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.test_sealing import not_torch
from support import triton_interpreter
from support.attention_cases import DEVICE
from support.examples import examples
from support.models import prompt, tiny
from xquant import KVCache
from xquant.kernels.triton import BACKEND, sealing
from xquant.methods import AttentionInputs
from xquant.past.sealing import seal
from xquant.quant import Affine, Codebook, Ragged
from xquant.quant.codebook import uniform_levels
from xquant.quant.pack import Tile
from xquant.quant.quantizer import dense

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()
PACKER = BACKEND.packer


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    bits=st.integers(1, 8),
    per=st.sampled_from(["token", "channel"]),
    group=st.sampled_from([0, 5, 16, 32, 48, 100, 128]),
    eta=st.sampled_from([0.0, 0.05, 0.17]),
    head=st.sampled_from([32, 64, 96]),
    heads=st.integers(1, 2),
    lanes=st.sampled_from(["tokens", "channels"]),
    tokens=st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    power=st.integers(-9, 5),
    hidden=st.sampled_from([None, 0.1, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_codes_scale_and_zero_are_those_of_torch(
    bits: int,
    per: Any,
    group: int,
    eta: float,
    head: int,
    heads: int,
    lanes: Any,
    tokens: int,
    dtype: torch.dtype,
    power: int,
    hidden: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    quantizer = Affine(bits, per, group, eta, tile=Tile(head, lanes))
    wide = torch.randn(2, tokens, head * heads + 5, generator=generator) * 10.0**power
    wide[torch.rand(wide.shape, generator=generator) < 0.05] = torch.inf
    x = (wide + 1).to(DEVICE, dtype)[..., 5:]  # some columns of what a method packs
    excluded = None
    if hidden is not None:
        excluded = (torch.rand(2, tokens, generator=generator) < hidden).to(DEVICE)
        if per == "channel":
            x = x.masked_fill(excluded[..., None], torch.nan)  # nothing of it counts
    expected = quantizer.encode(x, excluded)
    with not_torch(quantizer):
        found = PACKER.pack(quantizer, x, excluded)
    assert found.keys() == expected.keys()
    for name in expected:
        ours, theirs = dense(found, name), dense(expected, name)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    bits=st.integers(1, 8),
    per=st.sampled_from(["token", "channel"]),
    share=st.sampled_from([0.0, 0.02]),
    head=st.sampled_from([32, 64, 96]),
    heads=st.integers(1, 2),
    lanes=st.sampled_from(["tokens", "channels"]),
    tokens=st.sampled_from([32, 96]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    hidden=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_codes_of_codebooks_are_those_of_torch(
    bits: int,
    per: Any,
    share: float,
    head: int,
    heads: int,
    lanes: Any,
    tokens: int,
    dtype: torch.dtype,
    hidden: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randn(2**bits, generator=generator).clamp(-1, 1).sort().values
    quantizer = Codebook(bits, per, 0, levels, share, tile=Tile(head, lanes))
    x = torch.randn(2, tokens, head * heads + 5, generator=generator).to(DEVICE, dtype)[..., 5:]
    excluded = (torch.rand(2, tokens, generator=generator) < 0.2).to(DEVICE) if hidden else None
    expected = quantizer.encode(x, excluded)
    with not_torch(quantizer):
        found = PACKER.pack(quantizer, x, excluded)
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = found[name]
        if isinstance(theirs, Ragged):
            assert isinstance(ours, Ragged) and torch.equal(ours.flat(), theirs.flat())
        else:
            assert isinstance(ours, Tensor) and torch.equal(ours, theirs), name


@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize("kind", ["affine", "codebook"])
def test_nan_raises(per: Any, lanes: Any, kind: str) -> None:
    x = torch.randn(2, 32, 64, device=DEVICE)
    x[1, 30, 50] = torch.nan
    quantizer: Affine | Codebook = Affine(4, per, 32, tile=Tile(32, lanes))
    if kind == "codebook":
        quantizer = Codebook(4, per, 32, uniform_levels(4), tile=Tile(32, lanes))
    with not_torch(quantizer), pytest.raises(ValueError, match="NaN cannot be quantized"):
        PACKER.pack(quantizer, x, None)


def test_what_it_does_not_pack_goes_to_torch() -> None:
    x = torch.randn(2, 8, 6, device=DEVICE)
    for quantizer in (Affine(4, "token", 3), Affine(4, "token", 3, tile=Tile(6, "tokens"))):
        packed = PACKER.pack(quantizer, x, None)
        out, expected = torch.empty_like(x), torch.empty_like(x)
        PACKER.unpack(quantizer, packed, out)
        quantizer.decode(quantizer.encode(x, None), expected)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("spec", ["kivi-2bit:group=32,sink=2", "nf4:group=32"])
def test_a_cache_is_sealed_to_the_same_bytes(spec: str) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128, num_hidden_layers=2).to(DEVICE)
    caches = [KVCache(model, spec, kernel=k) for k in ("triton", "reference")]
    for cache in caches:
        with torch.no_grad():
            model(prompt(2, 70).to(DEVICE), past_key_values=cache, use_cache=True)
    ours, theirs = (cache.compressed[0].stream for cache in caches)
    for one, other in zip(ours.pool, theirs.pool, strict=True):
        for name in one:
            assert torch.equal(one[name].whole(), other[name].whole())


@pytest.mark.parametrize(
    ("spec", "launches"),
    [
        ("kivi-2bit:group=32,sink=2", 2),  # keys and values
        ("int4:group=32", 2),
        ("kivi-2bit:group=32,first_layers=1,first_bits=4", 4),
        ("asymkv-1.7bit:group=32,tail=0", 3),  # values of two widths
        ("crosslayer:group=32,tail=0,km=0,vm=0,kq=2,vq=0", 3),
    ],
)
def test_all_layers_are_sealed_at_once(spec: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bytes that each gets by itself."""
    model = tiny("llama", head_dim=32, hidden_size=128).to(DEVICE)
    cache, count = KVCache(model, spec, kernel="triton"), 0
    columns = torch.arange(32, device=DEVICE).expand(2, -1)
    cache.index.append(columns, columns >= torch.tensor([[0], [5]], device=DEVICE))
    for layer in cache.compressed:
        x, raw, states = (torch.randn(2, 32, n, device=DEVICE) for n in (128, 64, 64))
        heads = states.unflatten(-1, (2, 32)).transpose(1, 2)
        layer.append(AttentionInputs(x, x, raw, heads, heads), hold=True)
    apart = copy.deepcopy(cache)

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            nonlocal count
            count += 1
            return kernel[grid]

    kernel = sealing.seal
    monkeypatch.setattr(sealing, "seal", Counted())
    seal(cache.compressed)
    assert count == launches
    for layer in apart.compressed:
        if layer is layer.span[0]:
            seal(layer.span)
    assert count > launches
    for one, other in zip(cache.compressed, apart.compressed, strict=True):
        assert one.stream.tokens == other.stream.tokens == 32
        for fields, alone in zip(one.stream.pool, other.stream.pool, strict=True):
            assert fields.keys() == alone.keys()
            for name in fields:
                assert torch.equal(fields[name].whole(), alone[name].whole()), name

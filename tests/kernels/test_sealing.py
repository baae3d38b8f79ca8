"""Native sealing and decoding against the quantizers in torch: the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.examples import examples
from support.models import prompt, tiny
from xquant import KVCache
from xquant.kernels.cpu import library as native
from xquant.kernels.cpu.sealing import NativePacker
from xquant.past.packer import TORCH
from xquant.quant import Affine, Plain, Quantizer
from xquant.quant.pack import Tile
from xquant.quant.quantizer import dense

PATHS = native.isas()
pytestmark = pytest.mark.skipif(not PATHS, reason="no native library, or no CPU for it")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
paths = st.sampled_from(PATHS or ("none",))
Made = TypeVar("Made", bound=Quantizer)


@dataclass
class Case:
    quantizer: Affine
    x: Tensor
    excluded: Tensor | None


@st.composite
def cases(draw: Any) -> Case:
    """Blocks of every layout, among other columns or alone, off centre, some groups constant or wide."""
    tiled = draw(st.booleans())
    tile = None
    if tiled:
        head = draw(st.sampled_from([8, 24, 32, 40, 64, 72, 80, 96, 112, 120]))
        tile = Tile(head, draw(st.sampled_from(["tokens", "channels"])))
        tokens, channels = draw(st.sampled_from([32, 64, 128])), head * draw(st.integers(1, 3))
    else:
        tokens, channels = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    quantizer = Affine(
        draw(st.integers(1, 8)),
        draw(st.sampled_from(["token", "channel"])),
        draw(st.sampled_from([0, 1, 5, 16, 24, 32, 100, 128])),
        draw(st.sampled_from([0.0, 0.05, 0.17])),
        tile=tile,
    )
    blocks = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    left, right = draw(st.sampled_from([(0, 0), (3, 0), (0, 16), (5, 40)]))
    x = torch.randn(blocks, tokens, left + channels + right, generator=generator)
    x = x * 10.0 ** draw(st.integers(-9, 5)) + draw(st.sampled_from([0.0, 1.0, -300.0]))
    spots = torch.rand(x.shape, generator=generator)
    special = draw(st.sampled_from([None, 0.0, -0.0, torch.inf, -torch.inf, 7e4]))
    if special is not None:
        x[spots < draw(st.sampled_from([0.01, 0.7]))] = special
    if draw(st.booleans()):
        x = x[:, :1].expand_as(x).contiguous()  # constant per channel
    x = x.to(draw(st.sampled_from(DTYPES)))[..., left : left + channels]
    if draw(st.booleans()):
        x = x.flip(-1)  # a copy
    excluded = None
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.1, 0.6, 1.0]))
        excluded = torch.rand(blocks, tokens, generator=generator) < share
        if quantizer.per == "channel":
            x = x.masked_fill(excluded[..., None], torch.nan)  # nothing of it counts
    return Case(quantizer, x, excluded)


@contextmanager
def not_torch(quantizer: Made) -> Iterator[Made]:
    """The quantizer without its own encode and decode."""

    def refuse(*_: Any) -> None:
        raise AssertionError("torch was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(quantizer), "encode", refuse)
        patch.setattr(type(quantizer), "decode", refuse)
        yield quantizer


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(cases(), paths)
def test_codes_scale_and_zero_are_those_of_torch(case: Case, path: str) -> None:
    expected = case.quantizer.encode(case.x, case.excluded)
    with not_torch(case.quantizer) as quantizer:
        found = NativePacker(path).pack(quantizer, case.x, case.excluded)
    assert found.keys() == expected.keys()
    for name in expected:
        ours, theirs = dense(found, name), dense(expected, name)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs), name


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(cases(), paths, st.sampled_from(DTYPES), st.sampled_from([(0, 0), (3, 1), (16, 16)]))
def test_decoding_is_that_of_torch_and_touches_no_other_column(
    case: Case, path: str, dtype: torch.dtype, beside: tuple[int, int]
) -> None:
    packed = case.quantizer.encode(case.x, case.excluded)
    left, right = beside
    blocks, tokens, channels = case.x.shape
    whole = torch.full((blocks, tokens, left + channels + right), 7.0, dtype=dtype)
    expected, found = whole.clone(), whole
    case.quantizer.decode(packed, expected[..., left : left + channels])
    with not_torch(case.quantizer) as quantizer:
        NativePacker(path).unpack(quantizer, packed, found[..., left : left + channels])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize("tile", [None, Tile(32, "tokens"), Tile(32, "channels")])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 17, 30), (2, 63, 95)])
def test_nan_raises(path: str, per: Any, tile: Tile | None, place: tuple[int, int, int]) -> None:
    quantizer = Affine(4, per, 32, tile=tile)
    for dtype in DTYPES:
        x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[place] = torch.nan
        with not_torch(quantizer), pytest.raises(ValueError, match="NaN cannot be quantized"):
            NativePacker(path).pack(quantizer, x, None)


@pytest.mark.parametrize("path", PATHS)
def test_many_threads_seal_and_decode_the_same(path: str) -> None:
    x = torch.randn(5, 128, 192, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    for quantizer in (Affine(3, "token", 96, tile=Tile(64, "channels")), Affine(2, "channel", 0)):
        results = []
        for count in (1, 4):
            torch.set_num_threads(count)
            packed, out = NativePacker(path).pack(quantizer, x, None), torch.empty_like(x)
            NativePacker(path).unpack(quantizer, packed, out)
            results.append([*(dense(packed, name) for name in packed), out])
        torch.set_num_threads(threads)
        assert all(map(torch.equal, *results))


def test_what_is_not_for_the_library_goes_to_torch() -> None:
    x = torch.randn(2, 8, 6)
    affine = Affine(4, "token", 3)
    for quantizer, rows in (
        (Plain(torch.float32), x),
        (affine, x.double()),
        (affine, x[:0]),
        (affine, x.mT.contiguous().mT),
    ):
        packed = NativePacker(PATHS[0]).pack(quantizer, rows, None)
        out, expected = torch.empty_like(rows), torch.empty_like(rows)
        NativePacker(PATHS[0]).unpack(quantizer, packed, out)
        quantizer.decode(quantizer.encode(rows, None), expected)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("spec", ["kivi-2bit:group=32,sink=2", "xquant-4bit:group=32,tail=5"])
def test_a_cache_with_the_reference_kernel_seals_in_torch_to_the_same_bytes(spec: str) -> None:
    model = tiny("llama", head_dim=32, hidden_size=128)
    caches = {kernel: KVCache(model, spec, kernel=kernel) for kernel in ("auto", "reference")}
    for cache in caches.values():
        with torch.no_grad():
            model(prompt(1, 100), past_key_values=cache, use_cache=True)
    ours, theirs = (cache.compressed[0].stream for cache in caches.values())
    assert isinstance(ours.packer, NativePacker) and theirs.packer is TORCH
    for one, other in zip(ours.pool, theirs.pool, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name].whole(), other[name].whole())
    reads = (stream.read(torch.float32, stream.tokens) for stream in (ours, theirs))
    assert torch.equal(*reads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tile", [None, Tile(32, "tokens")])
def test_tensors_that_do_not_fit_each_other_never_reach_the_library(tile: Tile | None, path: str) -> None:
    quantizer, x = Affine(3, "token", 0, tile=tile), torch.randn(2, 32, 64)
    packed = NativePacker(path).pack(quantizer, x, None)
    for excluded in (torch.zeros(2, 31).bool(), torch.zeros(2, 32)):
        with pytest.raises(ValueError, match="a kernel wants"):
            NativePacker(path).pack(quantizer, x, excluded)
    for name in packed:
        field = dense(packed, name)
        for wrong in (field[:1], torch.cat([field, field], -1), field.float()):
            with pytest.raises(ValueError, match="a kernel wants"):
                NativePacker(path).unpack(quantizer, {**packed, name: wrong}, x.clone())
    for out in (torch.empty(3, 32, 64), torch.empty(2, 32, 96)):
        with pytest.raises(ValueError, match="a kernel wants"):
            NativePacker(path).unpack(quantizer, packed, out)
    if tile is not None:
        with pytest.raises(ValueError, match="63 channels are not whole tiles of 32"):
            NativePacker(path).pack(quantizer, x[..., :63], None)

"""Native sealing of codebooks against the quantizer in torch: the same bits, and the same outliers."""

from dataclasses import dataclass
from typing import Any

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
from xquant.quant import Codebook, Packed, Ragged
from xquant.quant.pack import Tile

PATHS = native.isas()
pytestmark = pytest.mark.skipif(not PATHS, reason="no native library, or no CPU for it")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
paths = st.sampled_from(PATHS or ("none",))


@dataclass
class Case:
    quantizer: Codebook
    x: Tensor
    excluded: Tensor | None


def levels_of(draw: Any, bits: int, generator: torch.Generator) -> Tensor:
    """Rising, perhaps some of them equal."""
    levels = (torch.rand(2**bits, generator=generator) * 2 - 1).sort().values
    if draw(st.booleans()):
        levels = (levels * 4).round() / 4
    return levels


def bounds_of(x: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of ``size`` channels, which leave some elements outside."""
    reach = x.float().clamp(-6e4, 6e4).abs().mean() * 3
    low, high = (torch.rand(2, size, generator=generator) * 2 - 1).sort(0).values * reach
    return low, high


@st.composite
def cases(draw: Any) -> Case:
    """Blocks of every layout and kind of range, some elements far out, tied or infinite."""
    tile = None
    if draw(st.booleans()):
        head = draw(st.sampled_from([8, 24, 32, 40, 64, 80, 120]))
        tile = Tile(head, draw(st.sampled_from(["tokens", "channels"])))
        tokens, channels = draw(st.sampled_from([32, 64, 128])), head * draw(st.integers(1, 3))
    else:
        tokens, channels = draw(st.integers(1, 70)), draw(st.sampled_from([1, 5, 16, 33, 100, 150, 300]))
    blocks, bits = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(blocks, tokens, channels + 8, generator=generator)
    x = x * 10.0 ** draw(st.integers(-9, 4)) + draw(st.sampled_from([0.0, -300.0]))
    if draw(st.booleans()):
        x = x.round()  # many are equal
    spots = torch.rand(x.shape, generator=generator)
    special = draw(st.sampled_from([None, 0.0, torch.inf, -torch.inf, 7e4]))
    if special is not None:
        x[spots < draw(st.sampled_from([0.01, 0.7]))] = special
    x = x.to(draw(st.sampled_from(DTYPES)))[..., 3 : 3 + channels]
    if draw(st.booleans()):
        x = x.flip(-1)  # a copy
    share, threshold, span = draw(st.sampled_from([0.0, 0.01, 0.05, 0.3])), None, None
    kind = draw(st.sampled_from(["found", "threshold", "offline", "offline and threshold"]))
    if "threshold" in kind:
        threshold = bounds_of(x, draw(st.sampled_from([1, channels])), generator)
    if "offline" in kind:
        span, share = bounds_of(x, channels, generator), share if threshold else 0.0
    quantizer = Codebook(
        bits,
        "channel" if span else draw(st.sampled_from(["token", "channel"])),
        draw(st.sampled_from([0, 1, 5, 16, 32, 100])) if span is None else 0,
        levels_of(draw, bits, generator),
        share,
        threshold,
        span,
        tile=tile,
    )
    excluded = None
    if draw(st.booleans()):
        excluded = torch.rand(blocks, tokens, generator=generator) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    return Case(quantizer, x, excluded)


def natively(path: str, quantizer: Codebook, x: Tensor, excluded: Tensor | None = None) -> Packed:
    """What the library packs; it is an error to ask torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Codebook, "encode", None)
        return NativePacker(path).pack(quantizer, x, excluded)


def assert_same(found: Packed, expected: Packed) -> None:
    assert found.keys() == expected.keys()
    for name, field in expected.items():
        ours = found[name]
        if isinstance(field, Ragged):
            assert isinstance(ours, Ragged)
            assert len(ours) == len(field)
            pairs = list(zip(ours.blocks, field.blocks, strict=True))
        else:
            assert isinstance(ours, Tensor)
            pairs = [(ours, field)]
        for one, other in pairs:
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name


@settings(max_examples=examples(500), deadline=None, derandomize=True)
@given(cases(), paths)
def test_codes_ranges_and_outliers_are_those_of_torch(case: Case, path: str) -> None:
    expected = case.quantizer.encode(case.x, case.excluded)
    assert_same(natively(path, case.quantizer, case.x, case.excluded), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 17, 30), (2, 63, 95)])
def test_nan_raises_wherever_it_is(path: str, per: Any, place: tuple[int, int, int]) -> None:
    quantizer = Codebook(2, per, 0, torch.linspace(-1, 1, 4), 0.01)
    for dtype in DTYPES:
        x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[place] = torch.nan
        excluded = x.isnan().any(-1)
        for hidden in (None, excluded):
            for pack in (quantizer.encode, lambda *of: natively(path, quantizer, *of)):
                with pytest.raises(ValueError, match="NaN cannot be quantized"):
                    pack(x, hidden)


@pytest.mark.parametrize("path", PATHS)
def test_many_threads_seal_the_same(path: str) -> None:
    x = torch.randn(5, 128, 192, generator=torch.Generator().manual_seed(0))
    quantizer = Codebook(3, "token", 0, torch.linspace(-1, 1, 8), 0.01, tile=Tile(64, "channels"))
    threads, results = torch.get_num_threads(), []
    for count in (1, 4):
        torch.set_num_threads(count)
        results.append(natively(path, quantizer, x))
    torch.set_num_threads(threads)
    assert_same(*results)


@pytest.mark.parametrize("path", PATHS)
def test_tensors_that_do_not_fit_each_other_never_reach_the_library(path: str) -> None:
    x, bounds = torch.randn(2, 32, 64), (torch.full((64,), -1.0), torch.full((64,), 1.0))
    quantizer = Codebook(2, "channel", 0, torch.linspace(-1, 1, 4), span=bounds, threshold=bounds)
    for excluded in (torch.zeros(2, 31).bool(), torch.zeros(2, 32)):
        with pytest.raises(ValueError, match="a kernel wants"):
            natively(path, quantizer, x, excluded)
    with pytest.raises(ValueError, match="a kernel wants"):
        natively(path, quantizer, x[..., :63])


def test_a_cache_seals_to_the_bytes_that_torch_gives() -> None:
    model = tiny("llama", head_dim=32, hidden_size=128)
    streams = []
    for kernel in ("auto", "reference"):
        cache = KVCache(model, "kvquant-3bit-1%:datatype=nf,scales=online,group=32", kernel=kernel)
        with torch.no_grad():
            model(prompt(1, 100), past_key_values=cache, use_cache=True)
        streams.append(cache.compressed[0].stream)
    ours, theirs = streams
    assert isinstance(ours.packer, NativePacker)
    assert theirs.packer is TORCH
    numbers = torch.arange(ours.blocks)
    for one, other in zip(ours.gather(numbers), theirs.gather(numbers), strict=True):
        assert_same(one, other)

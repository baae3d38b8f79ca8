"""Native sealing and decoding of ranked codes against torch: the same bits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.classed_blocks import classed_blocks
from support.examples import examples
from support.ranked_counts import counts_of
from xquant.kernels.cpu import library as native
from xquant.kernels.cpu.sealing import NativePacker
from xquant.past.packer import Packer
from xquant.quant.classes import Classed
from xquant.quant.quantizer import dense
from xquant.quant.ranked import Ranked, allot
from xquant.quant.steps import FARTHEST_STEP, steps_of

PATHS = native.isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(not PATHS, reason="no native library, or no CPU for it")


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_both_ways_are_those_of_torch(data: Any) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    channels, tokens = draw(st.integers(1, 70)), draw(st.sampled_from([1, 7, 16, 40, 128]))
    size = 10 ** (draw(st.integers(0, 8)) * torch.rand(channels, generator=generator) - 4)
    x = torch.randn(draw(st.integers(1, 6)), tokens, channels, generator=generator) * size
    x = x * draw(st.sampled_from([1.0, 0.0, 1e-25, 1e30]))
    x[:, : tokens // 3] *= draw(st.sampled_from([1.0, 0.0, 1e4]))
    x = x.to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        x = torch.cat([x, x], -1)[..., :channels]
    usual = steps_of(size.square()).to(torch.int16)
    counts = allot([size.square().sort(descending=True).values], draw(st.integers(0, 8 * channels)))
    rests = draw(st.integers(0, channels // 2))
    costs = None
    if draw(st.booleans()):
        steepness = draw(st.sampled_from([0.1, 1.0, 100.0]))
        costs = (torch.randn(channels, generator=generator) / size)[: channels - rests] * steepness
    if draw(st.booleans()):  # as the channel of costs of tc-cl
        usual[-1] = -FARTHEST_STEP
    quantizer = Ranked(usual, counts[0], rests, costs)
    excluded = draw(st.sampled_from([None, torch.rand(x.shape[:2], generator=generator) < 0.4]))
    path = draw(st.sampled_from(PATHS))
    packed = quantizer.encode(x, excluded)
    sealed = NativePacker(path).pack(quantizer, x, excluded)
    assert sealed.keys() == packed.keys()
    assert all(torch.equal(dense(sealed, name), dense(packed, name)) for name in packed)
    left, right = draw(st.sampled_from([(0, 0), (3, 0), (0, 16), (5, 40)]))
    dtype = draw(st.sampled_from(DTYPES))
    rows = torch.full((len(x), tokens, left + channels + right), 7.0, dtype=dtype)
    expected = rows.clone()
    columns = slice(left, left + channels)
    quantizer.decode(packed, expected[..., columns])
    NativePacker(path).unpack(quantizer, packed, rows[..., columns])
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None)
@given(case=classed_blocks())
def test_classes_of_tokens_are_packed_as_torch_packs_them(
    path: str, case: tuple[Classed, Tensor, Tensor | None]
) -> None:
    quantizer, x, excluded = case
    packer = NativePacker(path)
    wanted, found = quantizer.encode(x, excluded), packer.pack(quantizer, x, excluded)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(dense(found, name), dense(wanted, name)) for name in wanted)
    out, read = torch.empty_like(x), torch.empty_like(x)
    quantizer.decode(wanted, out)
    packer.unpack(quantizer, found, read)
    assert torch.equal(out, read)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 5, 40), (1, 63, 69)])
def test_nan_raises_in_any_token(path: str, place: tuple[int, int, int]) -> None:
    x = torch.randn(3, 64, 70, generator=torch.Generator().manual_seed(0))
    x[place] = torch.nan
    quantizer = Ranked(torch.zeros(70, dtype=torch.int16), counts_of({1: 10, 2: 20, 5: 10}))
    for excluded in (None, torch.arange(64).expand(3, -1) < 10):
        for packer in (NativePacker(path), Packer()):
            with pytest.raises(ValueError, match="NaN cannot be quantized"):
                packer.pack(quantizer, x, excluded)


@pytest.mark.parametrize("path", PATHS)
def test_tensors_that_do_not_fit_each_other_never_reach_the_library(path: str) -> None:
    x = torch.randn(2, 16, 6)
    usual = torch.zeros(12, dtype=torch.int16)[::2]  # with gaps, which are closed
    quantizer = Ranked(usual, counts_of({1: 2, 2: 2}))
    packed = NativePacker(path).pack(quantizer, x, None)
    for wrong in (x[..., :5], torch.cat([x, x], -1)):
        with pytest.raises(ValueError, match="a kernel wants"):
            NativePacker(path).pack(quantizer, wrong, None)
    for excluded in (torch.zeros(2, 15).bool(), torch.zeros(2, 16)):
        with pytest.raises(ValueError, match="a kernel wants"):
            NativePacker(path).pack(quantizer, x, excluded)
    for name in packed:
        field = dense(packed, name)
        for wrong in (field[:1], field[:, 1:], field.short()):
            with pytest.raises(ValueError, match="a kernel wants"):
                NativePacker(path).unpack(quantizer, {**packed, name: wrong}, x.clone())
    with pytest.raises(ValueError, match="a kernel wants"):
        NativePacker(path).unpack(quantizer, packed, torch.empty(3, 16, 6))

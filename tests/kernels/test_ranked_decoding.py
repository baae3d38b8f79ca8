"""Native sealing and decoding of ranked codes against torch: the same bits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xquant.kernels import native, sealing
from xquant.quant.quantizer import dense
from xquant.quant.ranked import Ranked, allot, steps_of

PATHS = native.paths()
pytestmark = pytest.mark.skipif(not PATHS, reason="no native library, or no CPU for it")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_both_ways_are_those_of_torch(data: Any) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    channels, tokens = draw(st.integers(1, 70)), draw(st.sampled_from([1, 7, 8, 16, 128]))
    size = 10 ** (draw(st.integers(0, 8)) * torch.rand(channels, generator=generator) - 4)
    x = torch.randn(draw(st.integers(1, 4)), tokens, channels, generator=generator) * size
    usual = steps_of(size.square()).to(torch.int16)
    counts = allot([size.square().sort(descending=True).values], draw(st.integers(0, 8 * channels)))
    quantizer = Ranked(usual, counts[0])
    excluded = draw(st.sampled_from([None, torch.rand(x.shape[:2], generator=generator) < 0.4]))
    path = draw(st.sampled_from(PATHS))
    packed = quantizer.encode(x, excluded)
    sealed = sealing.encode(quantizer, x, excluded, path)
    assert sealed.keys() == packed.keys()
    assert all(torch.equal(dense(sealed, name), dense(packed, name)) for name in packed)
    left, right = draw(st.sampled_from([(0, 0), (3, 0), (0, 16), (5, 40)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    rows = torch.full((len(x), tokens, left + channels + right), 7.0, dtype=dtype)
    expected = rows.clone()
    columns = slice(left, left + channels)
    quantizer.decode(packed, expected[..., columns])
    sealing.decode(quantizer, packed, rows[..., columns], path)
    assert torch.equal(rows, expected)

"""NVFP4: codes and scales of 16 channels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xquant.quant.float4 import E2M1, E4M3, GROUP, Float4

SIX, FOUR = Float4(), Float4((6.0, 4.0))


def through(quantizer: Float4, x: Tensor) -> Tensor:
    packed = quantizer.encode(x, None)
    fields = quantizer.fields(*x.shape[1:])
    assert {n: (t.shape[1:], t.dtype) for n, t in packed.items()} == {
        n: (f.shape, f.dtype) for n, f in fields.items()
    }
    out = torch.empty_like(x)
    quantizer.decode(packed, out)
    return out


def squared(x: Tensor) -> Tensor:
    """Of each group, ``[N, n, groups]``."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP))
    return x.unflatten(-1, (-1, GROUP)).square().sum(-1)


@given(st.integers(1, 9), st.integers(1, 70), st.floats(1e-2, 400), st.integers(0, 2**31))
def test_what_comes_back_is_as_near_as_the_levels_are(
    tokens: int, channels: int, size: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = size * torch.randn(2, tokens, channels)
    peak = squared(x.abs()).sqrt().repeat_interleave(GROUP, -1)[..., :channels]  # at least the largest
    for quantizer in (SIX, FOUR):
        assert ((through(quantizer, x) - x).abs() <= peak / 4 + 6 * 2**-10).all()  # of the least scale
    assert (squared(through(FOUR, x) - x) <= squared(through(SIX, x) - x) * (1 + 1e-5)).all()


def test_levels_times_a_scale_come_back_to_the_bit() -> None:
    scales = torch.tensor([2.0**-9, 0.0625, 1.0, 13.0, 448.0]).to(E4M3).float()
    x = scales[None, :, None] * torch.tensor(E2M1)
    assert torch.equal(through(SIX, x), x)
    assert torch.equal(through(FOUR, x), x)


def test_the_largest_becomes_four_where_that_is_nearer() -> None:
    x = torch.tensor([4.0, 3.0, 2.0, 1.5, 1.0, 0.5] * 2 + [0.0] * 4).view(1, 1, GROUP)
    assert torch.equal(through(FOUR, x), x)
    assert not torch.equal(through(SIX, x), x)


def test_edges() -> None:
    for quantizer in (SIX, FOUR):
        assert not through(quantizer, torch.zeros(1, 2, 20)).any()
        assert not through(quantizer, torch.full((1, 2, 20), 1e-4)).any()  # below the least scale
        assert torch.equal(through(quantizer, torch.full((1, 1, 16), 1e5)), torch.full((1, 1, 16), 6 * 448.0))
        with pytest.raises(ValueError, match="NaN"):
            quantizer.encode(torch.full((1, 2, 20), torch.nan), None)

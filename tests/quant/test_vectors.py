"""Codes of vectors: the nearest points, what they leave, and the bytes that they take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.examples import examples
from xquant.quant import Segment
from xquant.quant.levels import normal_error, normal_levels
from xquant.quant.quantizer import dense
from xquant.quant.vectors import E8, E8_SIZE, Pairs, Vectors

EVERY = [Pairs(64, 2), Pairs(64, 3), Pairs(64, 4), E8(64)]


def all_codes(quantizer: Vectors) -> Tensor:
    each = [torch.arange(2**bits, dtype=torch.uint8) for bits in quantizer.code_bits]
    return torch.cartesian_prod(*each).view(-1, len(each))


def decoded(quantizer: Vectors, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    quantizer.decode(quantizer.encode(x, None), out)
    return out


@pytest.mark.parametrize("quantizer", EVERY, ids=str)
def test_codes_are_those_of_the_nearest_points(quantizer: Vectors) -> None:
    points = quantizer.points(all_codes(quantizer))
    assert len(points.unique(dim=0)) == len(points) == 2 ** sum(quantizer.code_bits)
    x = torch.randn(300, quantizer.dim, generator=torch.Generator().manual_seed(0))
    x[::3] *= 3  # beyond the last points
    found = (quantizer.points(quantizer.nearest(x)) - x).square().sum(-1)
    least = torch.cdist(x.double(), points.double()).min(1).values.square().float()
    torch.testing.assert_close(found, least, rtol=1e-4, atol=1e-5)


def test_points_of_e8_are_of_the_lattice() -> None:
    codes = all_codes(E8(64))
    points = E8(64).points(codes) / E8_SIZE
    moved = points - torch.where(codes[:, 1:] >= 128, 0.25, -0.25)
    twice = (2 * moved).round()
    torch.testing.assert_close(2 * moved, twice)
    assert bool((twice % 2 == 1).all()) and bool((twice.sum(-1) % 4 == 0).all())


@pytest.mark.parametrize("quantizer", EVERY, ids=str)
def test_normal_numbers_lose_less_than_with_a_code_each(quantizer: Vectors) -> None:
    bits = sum(quantizer.code_bits) // quantizer.dim
    x = torch.randn(1, 4000, 64, generator=torch.Generator().manual_seed(0))
    error = (decoded(quantizer, x) - x).square().mean().item()
    # Scales are the heads' own, so that their size costs nothing: a little below even the best codes.
    assert 4.0**-bits < error < 0.96 * normal_error(normal_levels(bits))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([8, 12, 20, 33]),
    st.integers(1, 3),
    st.sampled_from([1, 8, 13]),
    st.sampled_from([0, 1, 2, 3]),
    st.floats(-30, 15),
)
def test_heads_of_any_size_by_themselves(
    size: int, heads: int, tokens: int, kind: int, octave: float
) -> None:
    quantizer = E8(size) if kind == 0 else Pairs(size, kind + 1)
    x = torch.randn(2, tokens, heads * size, generator=torch.Generator().manual_seed(0)) * 2**octave
    x[0, 0] = 0
    packed = quantizer.encode(x, None)
    held = sum(dense(packed, name)[0].nbytes for name in packed)
    assert held == Segment(x.shape[2], quantizer).parts(tokens).total()
    whole = decoded(quantizer, x)
    assert torch.equal(whole[0, 0], torch.zeros_like(whole[0, 0])) and bool(whole.isfinite().all())
    one = decoded(quantizer, x[1:, -1:, -size:])
    assert torch.equal(one, whole[1:, -1:, -size:])


def test_nan_is_refused() -> None:
    for quantizer in EVERY:
        with pytest.raises(ValueError, match="NaN"):
            quantizer.encode(torch.full((1, 2, 64), torch.nan), None)

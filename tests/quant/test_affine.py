from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from xquant.quant import Affine, Plain, Segment
from xquant.quant.affine import dequantize, quantize
from xquant.quant.quantizer import dense

BITS = (1, 2, 3, 4, 8)
bits = st.sampled_from(BITS)
dims = st.sampled_from([-1, -2])


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 20), st.integers(1, 12)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scale = 10.0 ** draw(st.integers(-6, 4))
    shift = draw(st.sampled_from([0.0, 1.0, -300.0]))
    return (torch.randn(shape, generator=generator) * scale + shift).clamp(-6e4, 6e4)


def there_and_back(x: torch.Tensor, b: int, dim: int, group: int, **kwargs: Any) -> torch.Tensor:
    codes, scale, zero = quantize(x, b, dim, group, **kwargs)
    return dequantize(codes, scale, zero, dim, group, torch.empty_like(x, dtype=torch.float32))


@settings(max_examples=examples(200), deadline=None)
@given(tensors(), bits, dims, st.integers(1, 25))
def test_error_is_at_most_half_a_step_and_the_rounding_of_scale_and_zero(
    x: torch.Tensor, b: int, dim: int, group: int
) -> None:
    codes, scale, zero = quantize(x, b, dim, group)
    groups = -(-x.shape[dim] // group)
    assert scale.shape[dim] == zero.shape[dim] == groups
    assert scale.dtype == zero.dtype == torch.float16
    assert codes.dtype == torch.uint8 and int(codes.max()) < 2**b
    back = there_and_back(x, b, dim, group)
    step, low = (t.float().repeat_interleave(group, dim).narrow(dim, 0, x.shape[dim]) for t in (scale, zero))
    # Inside the codes' range the error is half a step. fp16 rounds zero by 2^-11 of itself and the
    # scale by 2^-11 of itself, which moves the top code by as much of the range; subnormals by 2^-25.
    slack = 2**-11 * (low.abs() + (2**b - 1) * step) + 2**-25 * 2**b
    assert ((back - x).abs() <= step / 2 + 1.01 * slack + 1e-6 * x.abs()).all()


@settings(max_examples=examples(60), deadline=None)
@given(tensors(), bits, st.integers(1, 25), st.integers(0, 2**32 - 1))
def test_excluded_tokens_do_not_touch_the_others(x: torch.Tensor, b: int, group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    excluded = torch.rand(x.shape[:-1], generator=generator) < 0.3
    other = torch.where(excluded[..., None], torch.tensor(torch.inf), x)
    one = quantize(x, b, -2, group, excluded)
    two = quantize(other, b, -2, group, excluded)
    assert torch.equal(one[0][~excluded], two[0][~excluded])
    assert torch.equal(one[1], two[1]) and torch.equal(one[2], two[2])


@pytest.mark.parametrize("shift", [-300.0, 0.0, 5.0])
def test_ranges_are_those_of_the_tokens_that_count(shift: float) -> None:
    x = torch.randn(2, 9, 3) + shift
    excluded = torch.zeros(2, 9, dtype=torch.bool)
    excluded[:, [0, 4]] = True
    codes, scale, zero = quantize(x, 3, -2, 9, excluded)
    alone = quantize(x[:, ~excluded[0]], 3, -2, 9)
    assert torch.equal(codes[:, ~excluded[0]], alone[0])
    assert torch.equal(scale, alone[1]) and torch.equal(zero, alone[2])


def test_a_group_without_tokens_that_count_has_no_range() -> None:
    everything = torch.ones(1, 4, dtype=torch.bool)
    _, scale, zero = quantize(torch.randn(1, 4, 3) + 5, 4, -2, 4, everything)
    assert not scale.any() and not zero.any()


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("b", BITS)
def test_edges_are_finite_and_saturate(b: int, dim: int) -> None:
    edges = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 65504.0, 6e-8, 0.0, 1e-30])
    for dtype in (torch.float32, torch.bfloat16):
        back = there_and_back(edges.to(dtype).view(1, 2, 4), b, dim, 2)
        assert back.isfinite().all() and back.abs().max() <= 2 * 65504
    constant = torch.full((1, 6, 6), 3.25)
    assert torch.equal(there_and_back(constant, b, dim, 4), constant)
    tiny = torch.full((1, 4, 4), 1e-12)
    assert there_and_back(tiny, b, dim, 4).abs().max() <= 1e-7
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert there_and_back(torch.randn(1, 4, 4), b, dim, 4, excluded=everything).isfinite().all()


@pytest.mark.parametrize("b", BITS)
def test_fp16_stays_finite(b: int) -> None:
    x = torch.tensor([[[0.0, 65504.0]]]).half()
    out = torch.empty_like(x)
    quantizer = Affine(b, "token", 16)
    quantizer.decode(quantizer.encode(x, None), out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dim", [-1, -2])
def test_nan_is_refused(dim: int) -> None:
    x = torch.zeros(1, 4, 4)
    x[0, 2, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        quantize(x, 4, dim, 4)


@settings(max_examples=examples(60), deadline=None)
@given(
    bits,
    st.sampled_from(["token", "channel"]),
    st.integers(1, 30),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_bytes_are_what_the_formula_says(b: int, per: Any, group: int, n: int, channels: int) -> None:
    for quantizer in (Affine(b, per, group), Plain(torch.float16), Plain(torch.float32)):
        packed = quantizer.encode(torch.randn(3, n, channels), None)
        assert sum(t.nbytes for t in packed.values()) == 3 * Segment(channels, quantizer).parts(n).total()
        out = torch.empty(3, n, channels, dtype=torch.bfloat16)
        quantizer.decode(packed, out)
        assert out.isfinite().all()


@pytest.mark.parametrize("per", ["token", "channel"])
def test_ranges_within_a_token_are_of_one_size_and_as_few_as_can_be(per: Any) -> None:
    x = torch.randn(2, 12, 12)
    packed = Affine(4, per, 8).encode(x, None)
    # Twelve channels in ranges of at most 8: twice 6. Tokens are cut after every 8.
    dim, size = (-1, 6) if per == "token" else (-2, 8)
    _, scale, zero = quantize(x, 4, dim, size)
    assert torch.equal(dense(packed, "scale"), scale) and torch.equal(dense(packed, "zero"), zero)


def test_plain_numbers_past_fp16_saturate_where_they_are_kept_in_it() -> None:
    x = torch.tensor([[[1e6, -1e6, 2.5]]])
    for dtype, want in (
        (torch.float16, [65504.0, -65504.0, 2.5]),
        (torch.float32, x[0, 0].tolist()),
    ):
        out = torch.empty_like(x)
        Plain(dtype).decode(Plain(dtype).encode(x, None), out)
        assert out[0, 0].tolist() == want


def test_plain_in_the_models_dtype_is_the_identity() -> None:
    x = torch.randn(2, 5, 3)
    out = torch.empty_like(x)
    Plain(torch.float32).decode(Plain(torch.float32).encode(x, None), out)
    assert torch.equal(out, x)

"""Products of rows with weights of 4 and 8 bits."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from xquant.linear.grouped import GroupedLinear


def grouped(weight: torch.Tensor, bits: int, bias: torch.Tensor | None = None) -> Any:
    """A layer with this weight ``[N, C]`` in groups."""
    layer: Any = nn.Linear(*weight.T.shape, bias=False)
    layer.weight, layer.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    GroupedLinear.take(layer, bits=bits)
    return layer


@given(
    outputs=st.integers(1, 40),
    groups=st.integers(1, 5),
    rows=st.integers(1, 20),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    size=st.sampled_from([0.05, 1.0, 100.0]),
)
def test_products_are_those_of_what_codes_mean(
    outputs: int, groups: int, rows: int, bits: int, dtype: torch.dtype, bias: bool, size: float
) -> None:
    torch.manual_seed(outputs + rows)
    weight = size * torch.randn(outputs, 32 * groups)
    numbers = grouped(weight, bits).weight
    step = weight.view(outputs, groups, 32).aminmax(dim=-1)
    width = (step.max - step.min) / 15 if bits == 4 else 2 * weight.view_as(numbers).abs().amax() / 127
    assert ((numbers - weight).view(outputs, groups, 32).abs().amax(-1) <= 0.6 * width + 1e-3 * size).all()
    assert torch.equal(grouped(numbers, bits).weight, numbers)

    x, added = torch.randn(rows, 32 * groups).to(dtype), torch.randn(outputs).to(dtype) if bias else None
    with torch.no_grad():
        found = grouped(numbers, bits, added).to(dtype)(x)
    want = x.double() @ numbers.double().T + (0 if added is None else added.double())
    error = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert found.dtype == dtype
    bound = x.double().abs() @ numbers.double().abs().T + want.abs()
    assert ((found.double() - want).abs() <= error * bound + 1e-6 * size).all()


def test_nothing_of_a_row_that_is_not_finite_looks_like_a_number() -> None:
    x = torch.randn(3, 64)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    with torch.no_grad():
        found = grouped(torch.randn(32, 64), 4)(x)
    assert found.isfinite().all(1).tolist() == [False, False, True]

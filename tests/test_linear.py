"""`linear` against torch's, in the shapes that callers have."""

import pytest
import torch
from torch.nn import functional as F

from xquant.models.base import LARGE_PRODUCT, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 512])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_product_that_torch_computes(dtype: torch.dtype, channels: int, biased: bool) -> None:
    large = 2 * LARGE_PRODUCT // (96 * 512)
    states = torch.randn(2, 2 * large, channels, dtype=dtype)
    weight = torch.randn(96, channels, dtype=dtype)
    bias = torch.randn(96, dtype=dtype) if biased else None
    with torch.no_grad():
        for part in (
            states,
            states[:, 3 : large + 3],
            states[:, ::2],
            states[:, :1],
            states[:, :0],
        ):
            out, expected = linear(part, weight, bias), F.linear(part, weight, bias)
            assert out.shape == expected.shape
            tolerance = 1e-5 if dtype == torch.float32 else 2**-7
            assert (out - expected).norm() <= tolerance * expected.norm()


def test_it_has_gradients() -> None:
    states = torch.randn(512, 512, requires_grad=True)
    linear(states, torch.randn(96, 512)).sum().backward()
    assert states.grad is not None

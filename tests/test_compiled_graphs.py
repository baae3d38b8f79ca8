"""What the compiler makes of a step: products of one input are one call, and no operator stands before it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from xquant.linear import grouped
from xquant.linear.grouped import GroupedLinear
from xquant.steps import compiler_options


class Layer(nn.Module):
    """Products of one input, with a bias and without, and one of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 96), nn.Linear(64, 40)
        self.v, self.gate = nn.Linear(64, 40, bias=False), nn.Linear(64, 32, bias=False)
        self.down = nn.Linear(32, 64)
        for linear in list(self.children()):
            GroupedLinear.take(linear, bits=4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x), self.down(self.gate(x))


@torch.no_grad()
@pytest.mark.parametrize("sequences", [1, 3])
def test_products_of_one_input_are_one_call_of_a_function(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(sequences, 1, 64)
    want, products = layer(x), []
    options, into = compiler_options(), grouped._multiply_into

    def counted(*given: Any, out: Tensor) -> None:
        products.append(given[-2])
        into(*given, out=out)

    monkeypatch.setattr(torch._inductor.select_algorithm.extern_kernels, "xquant_linear_grouped", counted)
    found = torch.compile(layer, options=options)(x)
    assert sorted(map(list, products)) == [[40, 32], [64], [96, 40]]
    for ours, plain in zip(found, want, strict=True):
        torch.testing.assert_close(ours, plain)

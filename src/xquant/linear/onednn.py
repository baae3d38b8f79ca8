"""Weights in oneDNN's own layout, which multiplies one row up to twice as fast as rows do.

Where weights lie row by row, torch reads them at half the memory's bandwidth. oneDNN reads blocks of them in
order. Numbers stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operators import operator
from .layer import PackedWeight, refused

DTYPES = torch.float32, torch.bfloat16
ROWS = 512
"""oneDNN is asked for the layout for so many rows: it is as fast on one as the layout for one."""


class OneDnnWeight(PackedWeight):
    """A weight in oneDNN's layout. torch copies and pickles no such tensor: that is done as rows."""

    def __init__(self, weight: Tensor) -> None:
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    def dense(self) -> Tensor:
        return self._blocks.to_dense()

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        multiply = _operator if torch.compiler.is_dynamo_compiling() else _multiply
        out: Tensor = multiply(rows, self._blocks, bias)
        return out

    def applied(self, fn: Callable[[Tensor], Tensor]) -> "OneDnnWeight":
        weight = fn(self.dense())
        if not packs(weight):
            raise refused(weight)
        return OneDnnWeight(weight)

    def __getstate__(self) -> dict[str, Any]:
        return {"weight": self.dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["weight"])  # type: ignore[misc]


def packs(weight: Tensor) -> bool:
    """Whether oneDNN has a layout for a weight."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES


def _multiply(x: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
    return out


def _shape(x: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(blocks))


_operator = operator("linear", "(Tensor x, Tensor packed, Tensor? bias) -> Tensor", _multiply, _shape)
"""`_multiply` as the compiler takes it, which packs weights by itself only where they are constants."""

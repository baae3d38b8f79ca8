"""Weights in oneDNN's own layout, which multiplies one row up to twice as fast as rows do.

Where weights lie row by row, torch reads them at half the memory's bandwidth. oneDNN reads blocks of them in
order. Numbers stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operators import operator
from .layer import PackedLinear

ROWS = 512
"""oneDNN is asked for the layout for so many rows: it is as fast on one as the layout for one."""


def why_not(dtype: torch.dtype) -> str:
    """Why weights of ``dtype`` cannot be packed on this machine; empty where they can."""
    if not torch.backends.mkldnn.is_available():
        return "weights are packed by oneDNN, which this build of torch does not have"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (
            "oneDNN multiplies no bfloat16 on this CPU, which has no AVX-512: load the model in float32, or"
            " pack its weights in 8 or 4 bits"
        )
    return ""


class OneDnnLinear(PackedLinear):
    """A linear layer with its weight in oneDNN's layout."""

    dtypes = torch.float32, torch.bfloat16

    def pack(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)

    def dense(self) -> Tensor:
        return self.packed.to_dense()

    def multiply(self, rows: Tensor) -> Tensor:
        multiply = _operator if torch.compiler.is_dynamo_compiling() else _multiply
        out: Tensor = multiply(rows, self.packed, self.bias)
        return out

    def pack_applied(self, fn: Callable[[Tensor], Tensor]) -> None:
        weight = fn(self.dense())
        self.refuse_unpackable(weight)
        if why := why_not(weight.dtype):
            raise ValueError(why)
        self.pack(weight)

    def __getstate__(self) -> dict[str, Any]:  # torch copies and pickles no tensor in such a layout
        return {**self.__dict__, "packed": self.dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pack(state["packed"])


def packs(weight: Tensor) -> bool:
    """Whether oneDNN has a layout for a weight."""
    return weight.device.type == "cpu" and weight.dtype in OneDnnLinear.dtypes


def _multiply(x: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
    return out


def _shape(x: Tensor, blocks: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(blocks))


_operator = operator("linear", "(Tensor x, Tensor packed, Tensor? bias) -> Tensor", _multiply, _shape)
"""`_multiply` as the compiler takes it, which packs weights by itself only where they are constants."""

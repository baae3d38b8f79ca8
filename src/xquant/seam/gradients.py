"""Gradients through a compressed past: there are none, and a backward pass says so."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()


def without_gradients() -> AbstractContextManager[Any]:
    """`torch.no_grad` where gradients are recorded. It takes as long as a small product, and a decode step
    enters it twice a layer."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


class _PastIsConstant(torch.autograd.Function):
    """States that were computed with a compressed past, which no gradient goes back to."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, *inputs: Tensor) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "gradients do not go back through the tokens of a compressed cache: for a backward pass, run the"
            " model on the whole text at once"
        )


def past_is_constant(states: Tensor, *inputs: Tensor) -> Tensor:
    """``states`` that were computed of ``inputs`` and a compressed past: a backward pass through them says
    what is wrong, where it would give wrong gradients."""
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
        return states
    constant: Tensor = _PastIsConstant.apply(states, *inputs)
    return constant

"""A promise is a function of a form: it returns where it is kept, and raises what refuses it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from support.models import prompt, tiny

from .forms import Form, Held

SPEC = "kivi-16bit:group=32"
"""Loses nothing but roundings, in blocks that pages of a static cache hold too."""
LENGTH = 141
"""Of first tokens: four blocks, which are a chunk of a store, and some more."""
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 16, "initializer_range": 0.2}
CLOSE = 2e-4
"""Relative to the logits."""
Keep = Callable[[Form, ExitStack], None]


@dataclass(frozen=True)
class Promise:
    name: str
    said: str
    keep: Keep


KEPT: dict[str, Promise] = {}
"""What modules promise, by name."""


def promise(said: str) -> Callable[[Keep], Keep]:
    def add(keep: Keep) -> Keep:
        KEPT[keep.__name__] = Promise(keep.__name__, said, keep)
        return keep

    return add


# -- models, and what they should give -----------------------------------------------------------------


@memoize
def llama(dtype: torch.dtype = torch.float32) -> Any:
    with torch.inference_mode(False):
        return tiny("llama", **SMALL).to(dtype)


def theirs(model: Any) -> Held:
    """The same model with transformers' own cache."""
    return Held(model, "", ExitStack(), cache=DynamicCache(config=model.config))


def begun(form: Form, stack: ExitStack, model: Any, ids: Tensor, **inputs: Any) -> tuple[Held, Held]:
    """First tokens in a form, and in transformers' cache."""
    held, own = form.begin(model, SPEC, stack, ids, **inputs), theirs(model)
    with torch.no_grad():
        own(ids, **inputs)
    return held, own


def same(got: Tensor, want: Tensor, within: float = CLOSE) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = float((got - want).double().norm() / want.double().norm())
    assert error < within, f"off by {error:.2g}"


@torch.no_grad()
def go_on(held: Held, own: Held, ids: Tensor, *counts: int, within: float = CLOSE) -> None:
    """The same logits of the next tokens, in passes of ``counts``."""
    for count in counts:
        start = own.cache.get_seq_length()
        part = ids[:, start : start + count]
        same(held(part), own(part), within)
    assert held.cache.get_seq_length() == own.cache.get_seq_length()


def text() -> Tensor:
    return prompt(1, LENGTH + 60)

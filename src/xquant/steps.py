"""Decode steps that run compiled, of ``generate()`` and of whoever gives a model one token at a time."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from .models import view_model
from .seam.inputs import tokens_among

OPTIONS = {"size_asserts": False}
"""Of inductor. It asserts the sizes and strides of every tensor that an operator returns, in each step, which
takes a tenth of a small model's."""


def compile_steps(model: nn.Module) -> None:
    """Have the decode steps of a model run compiled, by `torch.compile`, in ``generate()`` too.

    A step is a call with one new token of each sequence. Other calls run as before, so that prompts of many
    lengths compile nothing. A step is compiled when it first runs, once for every kind of cache, which takes
    from some seconds to a few minutes. ``del model.forward`` undoes it.

    Args:
        model: a causal language model of transformers.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: its ``forward`` was replaced by something else, or the model cannot be served.

    Examples:
        >>> from xquant import StaticKVCache, compile_steps
        >>> compile_steps(model)
        >>> cache = StaticKVCache(model, "kivi-4bit", room=64)
        >>> out = model.generate(**inputs, cache=cache, max_new_tokens=8)
        >>> del model.forward
    """
    view_model(model)
    own = vars(model).get("forward")
    if isinstance(own, CompiledSteps):
        return
    if own is not None:
        raise ValueError("model.forward was replaced, as by accelerate or torch.compile: undo that first")
    model.forward = CompiledSteps(model)


class CompiledSteps:
    """The ``forward`` of a model, compiled for single tokens. A copy of the model has one of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forward = type(model).forward
        self._compiled: Any = None
        self.__signature__ = inspect.signature(partial(self._forward, model))
        """For ``generate()``, which looks at what a model takes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens = tokens_among(args, kwargs)
        if tokens is None or tokens.shape[1] != 1 or torch.compiler.is_compiling():
            return self._forward(self._model, *args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, options=dict(OPTIONS))
        return self._compiled(self._model, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

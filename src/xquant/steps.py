"""Decode steps that run compiled, of ``generate()`` and of whoever gives a model one token at a time."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .linear.joined import Joined
from .models import view_model
from .models.names import LISTS
from .seam.inputs import tokens_among


def compile_steps(model: nn.Module) -> None:
    """Have the decode steps of a model run compiled, by `torch.compile`, in ``generate()`` too.

    A step is a call with one new token of each sequence. Other calls run as before, so that prompts of many
    lengths compile nothing. A step is compiled when it first runs, once for every kind of cache, which takes
    from some seconds to a few minutes. ``del model.forward`` undoes it.

    What is within the decoder's layers is looked at when a step is compiled, and not again before each step.
    After weights were packed or adapters switched, call this once more: steps are then compiled anew.

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
        torch.compiler.reset()
    elif own is not None:
        raise ValueError("model.forward was replaced, as by accelerate or torch.compile: undo that first")
    model.forward = CompiledSteps(model)


def has_compiled_steps(model: nn.Module | None) -> bool:
    """Whether the steps of a model are those of `compile_steps`."""
    return model is not None and isinstance(vars(model).get("forward"), CompiledSteps)


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
        one = tokens is not None and tokens.shape[1] == 1 and not self._model.training
        if not one or torch.compiler.is_compiling():
            return self._forward(self._model, *args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, options=_options())
        return self._compiled(self._model, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self._model,)


def _options() -> dict[str, Any]:
    """Of a step, sizes of what operators return are not asserted, and what layers are made of is not looked
    at, but for their hooks, by which caches come and go. Products of one input are one operator."""
    options: dict[str, Any] = {"size_asserts": False, "post_grad_custom_pre_pass": Joined()}
    if hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe"):  # torch that lets guards be chosen
        options["guard_filter_fn"] = _guards
    return options


def _guards(found: Sequence[Any]) -> list[bool]:
    """Which guards are asked before every step."""
    return [_HOOKS in guard.name or not any(part in guard.name for part in _WITHIN) for guard in found]


_WITHIN = [f"._modules['{name}']._modules[" for name in LISTS]
"""What Dynamo's names of layers have in them."""
_HOOKS = "._forward_"
"""What those of hooks have that a step runs: those of gradients it does not."""

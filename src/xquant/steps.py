"""Decode steps that run compiled, of ``generate()`` and of whoever gives a model one token at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .linear.joined import Joined
from .models import find_decoder, view_model
from .models.names import LISTS
from .operators import call_directly
from .seam.compiled_steps import CompiledSteps, steps_of


def compile_steps(model: nn.Module) -> None:
    """Have the decode steps of a model run compiled, by `torch.compile`, in ``generate()`` too.

    A step is a call with one new token of each sequence. Other calls run as before, so that prompts of many
    lengths compile nothing. A step is compiled when it first runs, once for every kind of cache, which takes
    from some seconds to a few minutes. `uncompile_steps` undoes it.

    What is within the decoder's layers is looked at when a step is compiled, and not again before each step.
    After weights were packed or adapters switched, call this once more: steps are then compiled anew.

    Args:
        model: a causal language model of transformers.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: the ``forward`` of its decoder was replaced, or the model cannot be served.

    Examples:
        >>> from xquant import StaticKVCache, compile_steps, uncompile_steps
        >>> compile_steps(model)
        >>> cache = StaticKVCache(model, "kivi-4bit", room=64)
        >>> out = model.generate(**inputs, cache=cache, max_new_tokens=8)
        >>> uncompile_steps(model)
    """
    decoder = view_model(model).decoder
    if steps_of(decoder) is not None:
        torch.compiler.reset()
    elif "forward" in vars(decoder):
        raise ValueError("the decoder's forward was replaced, as by accelerate: undo that first")
    decoder.forward = CompiledSteps(decoder, compiler_options())


def uncompile_steps(model: nn.Module) -> None:
    """Have the decode steps of a model run as before `compile_steps`. Does nothing where they do.

    Examples:
        >>> from xquant import compile_steps, uncompile_steps
        >>> compile_steps(model)
        >>> uncompile_steps(model)
    """
    decoder = find_decoder(model)
    if decoder is not None and steps_of(decoder) is not None:
        del decoder.forward


def has_compiled_steps(model: nn.Module | None) -> bool:
    """Whether the steps of a model are those of `compile_steps`."""
    return model is not None and steps_of(find_decoder(model)) is not None


def compiler_options() -> dict[str, Any]:
    """Of `torch.compile`, for steps. Sizes of what operators return are not asserted. What layers are made
    of is not looked at; `CompiledSteps` sees their hooks, by which caches come and go. Products of one input
    are one call.
    """
    call_directly()
    options: dict[str, Any] = {"size_asserts": False, "post_grad_custom_pre_pass": Joined()}
    if hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe"):  # torch that lets guards be chosen
        options["guard_filter_fn"] = _guards
    return options


def _guards(found: Sequence[Any]) -> list[bool]:
    """Which guards are asked before every step."""
    return [not any(part in guard.name for part in _WITHIN) for guard in found]


_WITHIN = [f"._modules['{name}']._modules[" for name in LISTS]
"""What Dynamo's names of what is within layers have in them."""

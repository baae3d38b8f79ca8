"""CompiledSteps: the ``forward`` of a decoder that compiles its steps of one token.

It stands at the decoder and not at the model around it, so that hooks which begin and end a pass run outside
what is compiled: a step is one graph.

Dynamo would ask of every module before each step whether its hooks are those of the graph, thousands of
questions. Here they are told apart by one name, which a graph holds for (`Within`).
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..models.names import layers_of
from .inputs import tokens_among
from .layer import LayerHooks
from .passes import attachment_of


class Within:
    """The hooks within the layers of a decoder, and the attention that they call."""

    def __init__(self, decoder: nn.Module) -> None:
        self._config: Any = getattr(decoder, "config", None)
        self._hooks = [
            (f"{number} {name}", hooks)
            for number, layer in enumerate(layers_of(decoder))
            for name, module in layer.named_modules()
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._each = [hooks for _, hooks in self._hooks]
        self._names: dict[tuple[Any, ...], str] = {}

    @property
    def name(self) -> str:
        """Of what they are now. Our hooks are the same whatever attachment they are of."""
        key = getattr(self._config, "_attn_implementation", None), *chain.from_iterable(self._each)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{key[0]} {self._told()}"
        return name

    def _told(self) -> list[tuple[str, Any]]:
        return [
            (where, hook.__name__ if isinstance(getattr(hook, "__self__", None), LayerHooks) else number)
            for where, hooks in self._hooks
            for number, hook in hooks.items()
        ]


def _step(within: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is compiled: the ``forward`` of a decoder with these names `Within`."""
    assert within  # who reads it has Dynamo ask for it
    return forward(*args, **kwargs)


class CompiledSteps:
    """Runs a decoder. A copy of the decoder has one of its own.

    Args:
        options: of `torch.compile`.
    """

    def __init__(self, decoder: nn.Module, options: dict[str, Any]) -> None:
        self._decoder, self._options = decoder, options
        self._forward = type(decoder).forward
        self._within: Within
        self._compiled: Any = None
        self.__signature__ = inspect.signature(partial(self._forward, decoder))
        """For whoever looks at what a decoder takes."""

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is a step of one token, which may run compiled."""
        tokens = tokens_among(args, kwargs)
        one = tokens is not None and tokens.shape[1] == 1 and not self._decoder.training
        return one and not torch.compiler.is_compiling()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = attachment_of(self._decoder)
        current = None if attachment is None else attachment.current
        if not self.takes(args, kwargs) or not (current is None or current.compiled):
            return self._forward(self._decoder, *args, **kwargs)
        if self._compiled is None:
            self._within = Within(self._decoder)  # first: other threads come here, too
            self._compiled = torch.compile(_step, options=self._options)
        return self._compiled(self._within.name, self._forward, self._decoder, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self._decoder, self._options)


def steps_of(decoder: nn.Module | None) -> CompiledSteps | None:
    """What compiles the steps of a decoder; None where nothing does."""
    own = vars(decoder).get("forward") if decoder is not None else None
    return own if isinstance(own, CompiledSteps) else None

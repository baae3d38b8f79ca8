"""CompiledSteps: the ``forward`` of a decoder that compiles its steps of one token.

It stands at the decoder and not at the model around it, so that hooks which begin and end a pass run outside
what is compiled: a step is one graph.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from .inputs import tokens_among
from .passes import attachment_of


class CompiledSteps:
    """Runs a decoder. A copy of the decoder has one of its own.

    Args:
        options: of `torch.compile`.
    """

    def __init__(self, decoder: nn.Module, options: dict[str, Any]) -> None:
        self._decoder, self._options = decoder, options
        self._forward = type(decoder).forward
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
            self._compiled = torch.compile(self._forward, options=self._options)
        return self._compiled(self._decoder, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self._decoder, self._options)


def steps_of(decoder: nn.Module | None) -> CompiledSteps | None:
    """What compiles the steps of a decoder; None where nothing does."""
    own = vars(decoder).get("forward") if decoder is not None else None
    return own if isinstance(own, CompiledSteps) else None

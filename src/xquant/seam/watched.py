"""Watched: states that note whether a model did anything with them.

A cache may give an attention layer its newest states alone only if the layer hands them to the attention
function as they are, where the cache adds the rest. Whether it does is not assumed but seen.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Watched(Tensor):
    """A tensor that notes the first operation on it; what the operation gives is a plain tensor."""

    touched: bool = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for given in (*args, *kwargs.values()):
            for one in given if isinstance(given, list | tuple) else (given,):
                if isinstance(one, Watched):
                    one.touched = True
        if not all(issubclass(each, Watched) for each in types):
            # Quantized weights (torchao) answer by themselves, too.
            bare: tuple[Any, Any] = tree_map(plain, (args, kwargs))
            return func(*bare[0], **bare[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def watch(states: Tensor) -> Watched:
    """``states``, watched; their memory is the same."""
    return states.as_subclass(Watched)


def plain(states: Any) -> Any:
    """``states`` without being watched; anything else itself."""
    if not isinstance(states, Watched):
        return states
    with torch._C.DisableTorchFunctionSubclass():
        return states.as_subclass(Tensor)

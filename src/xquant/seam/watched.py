"""Watched: keys and values that note whether a model did anything with them.

A cache may return the newest keys and values alone to an attention layer, because our attention function adds
the past. That is right only if the layer passes them on to the attention function unchanged. `Watched` shows
whether it does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Watched(Tensor):
    """A tensor that notes that something was computed with it; the result is a plain tensor."""

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
            # Other tensors have functions of their own, as torchao's quantized weights do, and know none of
            # ours.
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

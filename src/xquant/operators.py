"""Operators of torch, ``torch.ops.xquant``: functions that a compiler calls and does not see into.

`torch.library.custom_op` makes them too, with checks at every call that take as long as a small product.
A decode step calls up to six operators in every layer.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("xquant", "DEF")


def operator(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    replays: bool = True,
) -> Callable[..., Any]:
    """The operator ``xquant::name`` of this ``schema``, run by ``function`` on any device, without gradients.

    Args:
        fake: gives an empty result of the right shape and dtype, for the compiler. The result may not be one
            of the arguments, or a view of one.
        replays: whether a CUDA graph may record it. Where not, the compiler records what is before and after
            it (``mode="reduce-overhead"``), from torch 2.8 on.
    """
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    _LIBRARY.define(name + schema, tags=() if replays or unsafe is None else (unsafe,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xquant::{name}", fake, lib=_LIBRARY)
    made: Callable[..., Any] = getattr(torch.ops.xquant, name).default
    return made

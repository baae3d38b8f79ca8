"""Operators of torch, ``torch.ops.xquant``: functions that a compiler calls and does not see into.

`torch.library.custom_op` makes them too, with checks at every call that take as long as a small product.
A decode step calls up to six operators in every layer.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_INTO: dict[Any, Callable[..., None]] = {}
_LIBRARY = torch.library.Library("xquant", "DEF")


def operator(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    replays: bool = True,
    into: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The operator ``xquant::name`` of this ``schema``, run by ``function`` on any device, without gradients.

    Args:
        fake: gives an empty result of the right shape and dtype, for the compiler. The result may not be one
            of the arguments, or a view of one.
        replays: whether a CUDA graph may record it. Where not, the compiler records what is before and after
            it (``mode="reduce-overhead"``), from torch 2.8 on.
        into: the same with a place for the result, for `call_directly`: it is given the tensors in order,
            those of lists among them, then all else, and ``out``. None of the tensors is optional.
    """
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    _LIBRARY.define(name + schema, tags=() if replays or unsafe is None else (unsafe,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xquant::{name}", fake, lib=_LIBRARY)
    made: Callable[..., Any] = getattr(torch.ops.xquant, name).default
    if into is not None:
        _INTO[made] = into
    return made


@cache
def call_directly() -> None:
    """Have graphs that are compiled from now on call functions, not operators, where there is an ``into``:
    torch takes some microseconds to find who runs an operator, as long as a small product takes. Does nothing
    where its compiler is not the one that is known here."""
    try:
        from torch._inductor import ir
        from torch._inductor.lowering import register_lowering
        from torch._inductor.select_algorithm import ExternKernelChoice
        from torch._inductor.utils import convert_shape_to_inductor
        from torch._inductor.virtualized import V
    except ImportError:
        return

    def lower(choice: Any) -> Callable[..., Any]:
        def lowered(*args: Any) -> Any:
            made = V.graph.current_node.meta["val"]
            sizes, strides = map(convert_shape_to_inductor, (made.shape, made.stride()))
            layout = ir.FixedLayout(made.device, made.dtype, [*sizes], [*strides])
            given = [each for arg in args for each in (arg if _of_tensors(arg) else [arg])]
            tensors = [ir.ExternKernel.realize_input(t) for t in given if isinstance(t, ir.IRNode)]
            others = [each for each in given if not isinstance(each, ir.IRNode)]
            name = choice.call_name()
            return ir.TensorBox.create(ir.ExternKernelOut(layout, tensors, others, python_kernel_name=name))

        def _of_tensors(arg: Any) -> bool:
            return isinstance(arg, list | tuple) and all(isinstance(each, ir.IRNode) for each in arg)

        return lowered

    for made, into in _INTO.items():
        choice = ExternKernelChoice(into, name=f"xquant_{made._opname}")
        register_lowering(made, type_promotion_kind=None)(lower(choice))

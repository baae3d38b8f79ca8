"""Compiled forward passes: one operator of torch for a layer's cache, which the compiler does not see into.

While `torch.compile` traces a layer, hooks note what they see (`LayerHooks.tracing`), `KVCache.update` gives
the new states back as they are, and the attention function gives all of it to the operator. When the compiled
layer runs, the operator shows it to the cache as hooks do in a pass that is not compiled, and attends. So all
layers of a decode step are one graph. Begin and end of the pass stay with hooks that are not compiled.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import compat
from ..kernels.call import AttentionCall
from ..operators import operator
from .layer import LayerHooks, unusual
from .passes import Attached, ForwardPass, LayerPass, ObservingCache, nothing

RUNNING = local()
"""``attachment``: a reference to that whose decoder runs in this thread."""
UNSEEN = "a pass that is not compiled must come before it"
PASSED = ("scaling", "softcap", "s_aux", "is_causal")
"""Options of an attention function that the operator passes on."""


@torch.compiler.assume_constant_result
def in_one_graph() -> bool:
    """Whether the graph that is traced may not be left (``fullgraph=True``)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(InstructionTranslator.current_tx().output.root_tx.one_graph)
    except AttributeError:  # of a torch that names it otherwise, whose own message says what is wrong
        return False


def outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook of `Attachment` that no graph can hold."""
    uncompiled = torch.compiler.disable(hook)

    @wraps(hook)
    def run(self: Attached, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if self.leaves_graphs(args, kwargs):
            uncompiled(self, module, args, kwargs, *output)

    return run


def attend(
    index: int,
    seen: LayerPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The attention of layer ``index`` over its cache and the new states, ``[B, T, H, D]``."""
    cos, sin = seen.rope or (None, None)
    shown = seen.x, seen.residual, seen.raw_key
    given = [options.get(name) for name in PASSED]
    why = _why_not(index, seen, key, value, options)
    out: Tensor = _operator(*shown, query, key, value, mask, seen.positions, cos, sin, index, why, *given)
    return out


def _why_not(index: int, seen: LayerPass, key: Tensor, value: Tensor, options: dict[str, Any]) -> str:
    if in_one_graph():
        return "with fullgraph=True nothing runs before the graph, where a pass of the cache begins"
    if key is not seen.key or value is not seen.value:
        return f"layer {index} works with the keys and values that its cache returns"
    if unusual(options):
        return "attention is asked for dropout, weights or biases"
    return ""


def attend_in_place(
    index: int,
    seen: LayerPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    options: dict[str, Any],
) -> Tensor:
    """The same of a decode step with a cache that stays where it is: a graph that is recorded of it holds for
    every step."""
    why = _why_not(index, seen, key, value, options)
    given = query, key, value, seen.mark, index
    out: Tensor = _operator_in_place(*given, why, scaling, softcap)
    return out


def _current() -> tuple[Attached, ForwardPass]:
    """What runs in this thread.

    Raises:
        ValueError: nothing does.
    """
    attachment: Attached | None = getattr(RUNNING, "attachment", nothing)()
    current = None if attachment is None else attachment.current
    if attachment is None or current is None:
        raise refused("hooks of its model did not run")
    return attachment, current


class _Call(NamedTuple):
    """What the operator of a layer is given: what hooks saw, and the arguments of the attention function."""

    x: Tensor | None
    residual: Tensor | None
    raw_key: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    positions: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    layer: int
    why: str
    """The call is refused for this reason, if there is one."""
    scaling: float | None
    softcap: float | None
    s_aux: Tensor | None
    is_causal: bool | None


def _attend(*given: Any) -> Tensor:
    call = _Call(*given)
    if call.why or call.x is None:
        raise refused(call.why or "hooks of its model did not run")
    attachment, current = _current()
    hooks = attachment.hooks[call.layer]
    _check_seen(hooks)
    named = {
        "position_ids": call.positions,
        "attention_mask": call.mask,
        "position_embeddings": None if call.cos is None else (call.cos, call.sin),
    }
    hooks.see_attention(hooks.view.module, (call.x,), named)
    seen = current.at(call.layer)
    seen.residual = seen.residual if call.residual is None else call.residual
    seen.raw_key = seen.raw_key if call.raw_key is None else call.raw_key
    cache: Any = current.cache
    states = cache.update(call.key, call.value, call.layer)
    every = {name: getattr(call, name) for name in PASSED}
    options = {name: option for name, option in every.items() if option is not None}
    attention = compat.attention_function(hooks.implementation, hooks.view.module)
    out, _ = attention(hooks.view.module, call.query, *states, call.mask, **options)
    return out.to(call.query.dtype).contiguous()  # as `_empty` says, whatever autocast takes


def _empty(x: Any, residual: Any, raw_key: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, tokens, size = query.shape[:3] + value.shape[-1:]
    return query.new_empty(batch, tokens, heads, size)


_operator = operator(
    "attend",
    "(Tensor? x, Tensor? residual, Tensor? raw_key, Tensor query, Tensor key, Tensor value, Tensor? mask,"
    " Tensor? positions, Tensor? cos, Tensor? sin, int index, str why, float? scaling, float? softcap,"
    " Tensor? s_aux, bool? is_causal) -> Tensor",
    _attend,
    _empty,
    replays=False,  # the cache grows
)


def _attend_in_place(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
    out = _empty_in_place(query, key, value)
    _attend_into(query, key, value, *given, out=out)
    return out


def _attend_into(query: Tensor, key: Tensor, value: Tensor, mark: Tensor, *given: Any, out: Tensor) -> None:
    index, why, scaling, softcap = given
    if why:
        raise refused(why)
    attachment, current = _current()
    view = attachment.hooks[index].view
    query, key = view.as_in_cache(query), view.as_in_cache(key)
    scaling = scaling or query.shape[-1] ** -0.5
    current.cache.attend_in_place(index, AttentionCall(query, key, value, None, scaling, softcap), out)


def _empty_in_place(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _empty(None, None, None, query, key, value)


# By its ``mark`` a graph is recorded anew for another cache: see `static.mark`.
_operator_in_place = operator(
    "attend_in_place",
    "(Tensor query, Tensor key, Tensor value, Tensor mark, int index, str why, float? scaling,"
    " float? softcap) -> Tensor",
    _attend_in_place,
    _empty_in_place,
    into=_attend_into,
)


def checked(hooks: LayerHooks, key: Tensor) -> Tensor:
    """The key of a layer that is traced. One that was not seen to pass on its states is checked as it runs:
    where it attends by itself, the cache would see nothing."""
    if in_one_graph() or hooks.known_to_pass_on():
        return key
    out: Tensor = _operator_checked(key, hooks.index)
    return out


def _checked(key: Tensor, index: int) -> Tensor:
    attachment, _ = _current()
    _check_seen(attachment.hooks[index])
    return key.clone()


def _check_seen(hooks: LayerHooks) -> None:
    if hooks.passes_on is None:
        raise refused(UNSEEN)
    if not hooks.passes_on:
        raise refused(f"layer {hooks.index} has {hooks.why_whole}")


_operator_checked = operator(
    "checked", "(Tensor key, int index) -> Tensor", _checked, lambda key, _: key.clone()
)


def why_uncompiled(hooks: Mapping[int, LayerHooks], module: nn.Module, cache: ObservingCache) -> str:
    """Why a pass of ``module`` cannot run compiled: gradients are recorded, layers want whole keys and
    values, or it is not known yet what they want. Empty where it can."""
    if not cache.traceable:
        return "states are collected in it"
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return "gradients are recorded; call the model under torch.no_grad()"
    passing = [each.passes_on for each in hooks.values()]
    if all(passing):
        return ""
    if None in passing:
        return UNSEEN
    first = next(each for each in hooks.values() if not each.passes_on)
    return f"layer {first.index} has {first.why_whole}"


def refused(why: str) -> ValueError:
    return ValueError(f"a compressed cache cannot be used in this compiled forward pass: {why}")

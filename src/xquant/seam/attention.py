"""The attention functions by which layers ask the cache in use what to attend to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..kernels.call import AttentionCall
from . import traced
from .gradients import past_is_constant, without_gradients
from .layer import NAME, LayerHooks, is_causal, unusual
from .naming import PREFIX, WRAPPED
from .passes import Route
from .watched import Watched, plain


def _attention(like: str) -> Callable[..., Any]:
    def own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The model's own, which a step over a compressed past does not even look up."""
        return compat.attention_function(like, module)(module, *args, **kwargs)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        hooks: LayerHooks | None = getattr(module, NAME, None)
        compiling = torch.compiler.is_dynamo_compiling
        if hooks is not None and hooks.traced is not None and compiling():
            seen, hooks.traced = hooks.traced, None
            if seen.mark is not None:
                softcap = kwargs.get("softcap") if like == "eager" else None
                states, scaling = (query, key, value), kwargs.get("scaling")
                return traced.attend_in_place(hooks.index, seen, *states, scaling, softcap, kwargs), None
            if seen.key is not None:
                return traced.attend(hooks.index, seen, query, key, value, attention_mask, kwargs), None
        current = None if hooks is None else hooks.attachment.current
        returned = None
        if current is not None and hooks is not None:
            returned = current.returned.pop(hooks.index, None)
        if hooks is None or current is None or returned is None:
            return own(module, query, plain(key), plain(value), attention_mask, **kwargs)
        reached = returned.reached(key, value)
        if isinstance(returned.key, Watched):
            hooks.learn(reached)
        if not reached and returned.route is Route.NEWEST:
            raise hooks.attachment.unserved(hooks.index)
        key, value = plain(key), plain(value)
        if returned.route is Route.LATENTS:
            return hooks.attend_to_latents(own, query, attention_mask, kwargs)
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        softcap = logits = None
        if like == "eager":  # transformers' sdpa knows neither
            softcap, logits = kwargs.get("softcap"), kwargs.get("s_aux")
        cache, index = current.cache, hooks.index

        def whole(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Any:
            """Attention over the states of all tokens."""
            asked = AttentionCall(query, keys, values, mask, scaling, softcap, logits)
            known = mask is not None or is_causal(like, module, query, keys, kwargs)
            if cache.prompts is not None and known and not unusual(kwargs):
                found = cache.prompts.attend(asked, current)
                if found is not None:
                    return found, None
            return own(module, query, keys, values, mask, **kwargs)

        if returned.route is Route.WHOLE:
            hooks.see_expanded(returned, key, value)
            return whole(query, key, value, attention_mask)

        query, key = hooks.view.as_in_cache(query), hooks.view.as_in_cache(key)
        exact = query, key, value
        out = None
        with without_gradients():
            call = AttentionCall(*exact, attention_mask, scaling, softcap, logits)
            cache.see(index, call)
            if not unusual(kwargs):
                out = cache.attend(index, call)
            if out is None:
                keys, values, mask = cache.answer(index, key, value, attention_mask)
        if out is not None:
            return past_is_constant(out, *exact), None
        if keys is key:  # nothing came before
            return whole(query, key, value, mask)
        with torch.no_grad():
            out, weights = whole(query, keys, values, mask)
        return past_is_constant(out, *exact), weights

    return attend


def register() -> None:
    """Let transformers know the functions."""
    for name in WRAPPED:
        compat.register_attention(PREFIX + name, name, _attention(name))

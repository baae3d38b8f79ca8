"""Who attends at a layer in one forward pass, and why: the one place that decides it."""

import torch

from ..kernels.choose import Choice
from ..past.sequences import MOST_QUERIES
from .layer import LayerHooks
from .passes import Route


def route(hooks: LayerHooks, queries: int, past: bool, alone: bool = False) -> Route:
    """The route of a layer whose new tokens are so many ``queries``, after a ``past`` or without one.

    ``alone``: the cache cannot return whole states, so a layer that was not seen to pass them on is tried.
    """
    few = past and queries <= MOST_QUERIES
    if hooks.absorbs and few and not torch.is_grad_enabled():
        return Route.LATENTS
    if hooks.passes_on or (hooks.passes_on is None and alone):
        return Route.NEWEST
    return Route.WHOLE


def described(hooks: LayerHooks, choice: Choice) -> str:
    """What attends at a layer for which a backend was chosen, and why nothing faster does."""
    return hooks.why_whole if hooks.passes_on is False else str(choice)

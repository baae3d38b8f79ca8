"""What layers see of a text: their inputs X, and whatever an experiment makes of them."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from xquant.models import AttentionView
from xquant.seam.hooks import attach

from .printed import Rows
from .setup import Setup

States = Callable[[AttentionView, Tensor], Mapping[str, Tensor]]
"""From a layer and its post-norm X ``[T, d]`` to the states to look at, ``[T, C]``, by name."""


def layers(setup: Setup) -> list[AttentionView]:
    """The layers that a cache compresses, bottom up."""
    return attach(setup.model).view.compressed


def watch(setup: Setup, see: Callable[[AttentionView, Tensor], None]) -> None:
    """Show ``see`` the post-norm X ``[T, d]`` of each layer, bottom up, window by window of the text."""

    def hook(view: AttentionView) -> Callable[..., None]:
        def look(module: torch.nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor]) -> None:
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            see(view, x[0])

        return look

    windows = setup.ids.to(setup.model.device)
    handles = [view.module.register_forward_pre_hook(hook(view), with_kwargs=True) for view in layers(setup)]
    try:
        for done, window in enumerate(windows):
            setup.progress(done, len(windows), "reading the text")
            with torch.inference_mode():
                setup.model(window[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def similarity(setup: Setup, states: States) -> Rows:
    """How alike the states of neighbouring layers are, token by token.

    ``cosine`` with the layer below, and ``difference``: the norm of the difference over that of the state.
    """
    lowest = layers(setup)[0]
    found: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    below: dict[str, Tensor] = {}

    def see(view: AttentionView, x: Tensor) -> None:
        for name, state in states(view, x).items():
            if view is not lowest:
                cosine = cosine_similarity(state, below[name], dim=-1)
                difference = (state - below[name]).norm(dim=-1) / state.norm(dim=-1)
                found[view.index, name].append(torch.stack([cosine.mean(), difference.mean()]))
            below[name] = state

    watch(setup, see)
    rows = []
    for (layer, name), windows in found.items():
        cosine, difference = torch.stack(windows).mean(0).tolist()
        rows.append({"layer": layer, "state": name, "cosine": cosine, "difference": difference})
    return rows


def magnitudes(setup: Setup, states: States) -> Rows:
    """The mean magnitude of every channel: which is the ``largest``, and how many ``times_median`` it is.

    The lowest, the middle and the highest layer have all ``magnitudes``, for a picture.
    """
    every = [view.index for view in layers(setup)]
    shown = (every[0], every[len(every) // 2], every[-1])
    found: dict[tuple[int, str], list[Tensor]] = defaultdict(list)

    def see(view: AttentionView, x: Tensor) -> None:
        for name, state in states(view, x).items():
            found[view.index, name].append(state.abs().mean(0).cpu())

    watch(setup, see)
    rows = []
    for (layer, name), windows in found.items():
        mean = torch.stack(windows).mean(0)
        largest, times = int(mean.argmax()), (mean.max() / mean.median()).item()
        row = {"layer": layer, "state": name, "largest": largest, "times_median": times}
        if layer in shown:
            row["magnitudes"] = [float(f"{value:.4g}") for value in mean.tolist()]
        rows.append(row)
    return rows

"""Reads texts into caches: a block at a time, as if token by token, or once for several methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from xquant.calibration import Calibration
from xquant.compat import CACHE
from xquant.kernels.call import AttentionCall
from xquant.methods import Method
from xquant.seam.masks import PassMask
from xquant.seam.passes import LayerInputs, ObservingCache

from ..pyramid import Pyramid
from ..pyramid.cache import AnyCache, cache_of

PASS = 16
"""Tokens of an answer that are read at a time, at most."""


def logits_of(model: Any, cache: AnyCache, ids: Tensor, block: int | None) -> Tensor:
    """Logits ``[B, T, V]`` of token ids ``[B, T]``, read ``block`` tokens at a time, or all at once."""
    parts = ids.split(block or ids.shape[1], 1)
    logits = [model(part, **{CACHE: cache}, use_cache=True).logits for part in parts]
    return logits[0] if len(logits) == 1 else torch.cat(logits, 1)


def passes_of(method: Method, start: int, count: int) -> list[int]:
    """How many tokens to read at a time of ``count`` that follow ``start`` others, so that it comes to the
    same as one by one: at most `PASS`, and the token that completes a block of ``method`` by itself, as some
    methods seal the block before that token reads it. PyramidInfer drops tokens after every pass."""
    if isinstance(method, Pyramid):
        return [1] * count
    found: list[int] = []
    for place in range(start - method.tail, start - method.tail + count):
        # The first block may begin with the sinks, or after them.
        inside = {(place - sinks) % method.group for sinks in (0, method.sink)}
        if inside & {0, method.group - 1} or not found or found[-1] == PASS:
            found.append(0)
        found[-1] += 1
    return found


@torch.inference_mode()
def read_together(
    model: Any, methods: Mapping[Method, Calibration | None], ids: Tensor
) -> dict[Method, AnyCache]:
    """A cache of each method that holds the tokens ``ids`` ``[1, T]``, which attend to each other exactly:
    what they compute is the same for all methods, so one forward pass fills all caches.

    Args:
        methods: with the calibrations of those that need one.
    """
    caches = {method: cache_of(model, method, calibration) for method, calibration in methods.items()}
    if ids.shape[1]:
        model(ids, **{CACHE: Together(list(caches.values()))}, logits_to_keep=1)
    return caches


class Together(DynamicCache, ObservingCache):
    """Fills empty caches of one model in one forward pass. It holds nothing itself, and is used once."""

    def __init__(self, caches: Sequence[AnyCache]) -> None:
        super().__init__()
        self.caches, self.attachment = caches, caches[0].attachment

    def begin(self, batch: int, length: int, mask: PassMask) -> None:
        for cache in self.caches:
            cache.begin(batch, length, mask)

    def observe(self, given: LayerInputs) -> None:
        for cache in self.caches:
            cache.observe(given)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All return the same: tokens of a first forward pass attend to each other exactly."""
        current, states = self.attachment.current, (key_states, value_states)
        seen = None if current is None else current.inputs.get(layer_idx)
        for cache in self.caches:
            if current is not None and seen is not None:
                current.inputs[layer_idx] = seen  # each takes it away
            states = cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    def see(self, index: int, call: AttentionCall) -> None:
        for cache in self.caches:
            cache.see(index, call)

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return key, value, mask

    def finish(self, failed: bool = False) -> None:
        for cache in self.caches:
            cache.finish(failed)

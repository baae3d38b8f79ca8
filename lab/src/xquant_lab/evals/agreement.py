"""How closely a compressed cache follows the full one on given prompts, whatever they ask.

A small model answers hardly any task, so its scores order methods by chance. Its predictions order them well:
on a prompt's last tokens, and along the answer that it gives with the full cache.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xquant.calibrations import Calibrations
from xquant.compat import CACHE
from xquant.methods import Full, Method

from ..pyramid.cache import AnyCache
from .reading import read_together

LAST = 16
"""Tokens at the end of a prompt that read the tokens before them from the store."""
ANSWER = 32
"""Greedy tokens of the full cache after a prompt that are compared."""


@dataclass(frozen=True)
class Agreement:
    """A method on one prompt, or means over prompts."""

    kl: float  # of the predictions on the prompt's last tokens from the full cache's, nats
    same_tokens: float  # greedy tokens before the first that is not the full cache's, of `ANSWER`


def mean(found: Sequence[Agreement]) -> Agreement:
    """Over prompts."""
    return Agreement(fmean(one.kl for one in found), fmean(one.same_tokens for one in found))


class Comparison:
    """Reads each prompt of a task once for all methods, the full cache first, and compares what they predict.

    ``found`` has the agreement of each method on each prompt. The answers are kept too: `answer` gives them
    in the order of the prompts.
    """

    def __init__(self, model: Any, methods: Sequence[Method], calibrations: Calibrations) -> None:
        self._model = model
        self._given = {method: calibrations.of(method) for method in (Full(), *methods)}
        self._answers: dict[Method, deque[Tensor]] = {method: deque() for method in self._given}
        self.found: dict[Method, list[Agreement]] = {method: [] for method in self._given}

    def answer(self, method: Method, prompt: Tensor, generate: Callable[[AnyCache], Tensor]) -> Tensor:
        """The token ids of ``prompt`` ``[1, T]`` and of its answer.

        Args:
            generate: makes them with a cache that may hold the prompt's first tokens.
        """
        if method == Full():
            self._read(prompt, generate)
        return self._answers[method].popleft()

    @torch.inference_mode()
    def _read(self, prompt: Tensor, generate: Callable[[AnyCache], Tensor]) -> None:
        last = min(LAST, prompt.shape[1])
        earlier, rest = prompt.split([prompt.shape[1] - last, last], 1)
        caches = read_together(self._model, self._given, earlier)
        full = _reference(self._model, copy.deepcopy(caches[Full()]), rest)
        for method, cache in caches.items():
            same = Agreement(0.0, ANSWER)
            if method != Full():
                same = _compare(self._model, copy.deepcopy(cache), rest, full)
            self.found[method].append(same)
            self._answers[method].append(generate(cache))


@dataclass(frozen=True)
class _Reference:
    """What the model does with the full cache."""

    logits: Tensor  # [LAST, V], on the prompt's last tokens
    answer: list[int]  # ANSWER token ids


def _reference(model: Any, cache: AnyCache, rest: Tensor) -> _Reference:
    logits = model(rest, **{CACHE: cache}).logits
    tokens = list(islice(_greedy(model, cache, logits), ANSWER))
    return _Reference(logits[0], tokens)


def _compare(model: Any, cache: AnyCache, rest: Tensor, full: _Reference) -> Agreement:
    logits = model(rest, **{CACHE: cache}).logits
    own, wanted = (each.float().log_softmax(-1) for each in (logits[0], full.logits))
    kl = F.kl_div(own, wanted, reduction="batchmean", log_target=True).item()
    pairs = zip(full.answer, _greedy(model, cache, logits), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Rounding can leave a divergence of next to nothing below zero.
    return Agreement(max(kl, 0.0), same)


def _greedy(model: Any, cache: AnyCache, logits: Tensor) -> Iterator[int]:
    """Tokens after ``logits`` ``[1, t, V]``, one by one; an end of a text does not end them."""
    while True:
        token = logits[:, -1:].argmax(-1)
        yield int(token)
        logits = model(token, **{CACHE: cache}).logits

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
from .reading import passes_of, read_together

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
    in the order of the prompts. Each cache reads the full cache's answer, several tokens at a time. Where it
    would have gone on with each of them, that is its own answer, and nothing is generated.
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
        full = caches.pop(Full())
        beside = copy.deepcopy(full)
        logits = self._model(rest, **{CACHE: beside}).logits
        whole = generate(full)
        answer: list[int] = whole[0, prompt.shape[1] :].tolist()
        wanted = _continued(self._model, beside, logits, answer)
        self.found[Full()].append(Agreement(0.0, ANSWER))
        self._answers[Full()].append(whole)
        for method, cache in caches.items():
            steps = passes_of(method, prompt.shape[1], len(wanted))
            kl, same = _compare(self._model, copy.deepcopy(cache), rest, logits[0], wanted, steps)
            self.found[method].append(Agreement(kl, min(same, ANSWER)))
            self._answers[method].append(whole if same >= len(answer) else generate(cache))


def _continued(model: Any, cache: AnyCache, logits: Tensor, answer: list[int]) -> list[int]:
    """The greedy tokens ``answer`` after ``logits`` ``[1, t, V]``, and more where they are not `ANSWER`."""
    missing = ANSWER - len(answer)
    if answer and missing > 0:
        logits = model(torch.tensor([answer], device=logits.device), **{CACHE: cache}).logits
    return answer + list(islice(_greedy(model, cache, logits), max(missing, 0)))


def _compare(
    model: Any, cache: AnyCache, rest: Tensor, full: Tensor, wanted: Sequence[int], steps: Sequence[int]
) -> tuple[float, int]:
    """The divergence from the logits ``full`` ``[LAST, V]`` on the tokens ``rest``. And of the tokens
    ``wanted`` after them, read in passes of ``steps``, those before the first that is not the most likely."""
    logits = model(rest, **{CACHE: cache}).logits
    own, exact = (each.float().log_softmax(-1) for each in (logits[0], full))
    kl = F.kl_div(own, exact, reduction="batchmean", log_target=True).item()
    pairs = zip(wanted, _along(model, cache, logits, wanted, steps), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Rounding can leave a divergence of next to nothing below zero.
    return max(kl, 0.0), same


def _along(
    model: Any, cache: AnyCache, logits: Tensor, tokens: Sequence[int], steps: Sequence[int]
) -> Iterator[int]:
    """The most likely token after ``logits`` ``[1, t, V]`` and after each of ``tokens``."""
    yield int(logits[0, -1].argmax())
    for part in torch.tensor([tokens], device=logits.device).split(list(steps), 1):
        yield from model(part, **{CACHE: cache}).logits[0].argmax(-1).tolist()


def _greedy(model: Any, cache: AnyCache, logits: Tensor) -> Iterator[int]:
    """Tokens after ``logits`` ``[1, t, V]``, one by one; an end of a text does not end them."""
    while True:
        token = logits[:, -1:].argmax(-1)
        yield int(token)
        logits = model(token, **{CACHE: cache}).logits

"""How closely a compressed cache follows the full one on given prompts, whatever they ask.

A small model answers hardly any task, so its scores order methods by chance. Its predictions order them well:
on a prompt's last tokens, and along the answer that it gives with the full cache.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache import KVCache

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


@dataclass(frozen=True)
class _Reference:
    """What the model does with the full cache."""

    logits: Tensor  # [LAST, V], on the prompt's last tokens
    answer: list[int]  # ANSWER token ids


class Comparison:
    """Compares caches with the full one, prompt by prompt. All get the same prompts in the same order, the
    full cache first. Its logits stay in memory: `LAST` rows of a prompt.

    ``found`` has the agreement of each prompt since the last `begin`.
    """

    def __init__(self) -> None:
        self._references: list[_Reference] = []
        self._expected: Iterator[_Reference] | None = None
        self.found: list[Agreement] = []

    def begin(self, full: bool) -> None:
        """What follows are all prompts with the full cache, or with another."""
        if full:
            self._references.clear()
        self._expected = None if full else iter(self._references)
        self.found = []

    @torch.inference_mode()
    def read(self, model: Any, cache: KVCache, prompt: Tensor) -> None:
        """Read ``prompt`` ``[1, T]`` without its last tokens into an empty cache, and compare on a copy."""
        last = min(LAST, prompt.shape[1])
        earlier, rest = prompt.split([prompt.shape[1] - last, last], 1)
        if earlier.shape[1]:
            model(earlier, past_key_values=cache, logits_to_keep=1)
        aside = copy.deepcopy(cache)
        if self._expected is None:
            own = _answer(model, aside, rest)
            self._references.append(own)
            self.found.append(Agreement(0.0, ANSWER))
        else:
            self.found.append(_compare(model, aside, rest, next(self._expected)))


def _answer(model: Any, cache: KVCache, rest: Tensor) -> _Reference:
    logits = model(rest, past_key_values=cache).logits
    tokens = list(islice(_greedy(model, cache, logits), ANSWER))
    return _Reference(logits[0], tokens)


def _compare(model: Any, cache: KVCache, rest: Tensor, full: _Reference) -> Agreement:
    logits = model(rest, past_key_values=cache).logits
    own, wanted = (each.float().log_softmax(-1) for each in (logits[0], full.logits))
    kl = F.kl_div(own, wanted, reduction="batchmean", log_target=True).item()
    pairs = zip(full.answer, _greedy(model, cache, logits), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Rounding can leave a divergence of next to nothing below zero.
    return Agreement(max(kl, 0.0), same)


def _greedy(model: Any, cache: KVCache, logits: Tensor) -> Iterator[int]:
    """Tokens after ``logits`` ``[1, t, V]``, one by one; an end of a text does not end them."""
    while True:
        token = logits[:, -1:].argmax(-1)
        yield int(token)
        logits = model(token, past_key_values=cache).logits

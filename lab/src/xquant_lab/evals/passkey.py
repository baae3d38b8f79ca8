"""Passkey retrieval: a number hidden in a long text is asked for at its end (KVQuant, arXiv 2401.18079,
Table 2, after Mohtashami and Jaggi, arXiv 2305.16300).

With ``attend="store"`` every token of the prompt reads the packed store, unless the method is not causal.
With ``attend="chunk"``, as in the paper and in `generate`, the prompt's tokens attend to each other exactly.
The last of them and the answer, which is decoded greedily, read the store in any case.
"""

import copy
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from xquant.calibration import Calibration
from xquant.calibrations import Calibrations
from xquant.compat import CACHE
from xquant.contents.options import ATTEND
from xquant.methods import Method
from xquant.models.weights import home
from xquant.positions import check_context
from xquant.spec import parse_method

from ..pyramid.cache import AnyCache, cache_of
from .journal import Journal
from .reading import read_together

OPENING = "One number is hidden in the following text. Remember it, for it is asked for at the end.\n\n"
FILLER = (
    " The river is wide and the water moves slowly.",
    " A boat lies at the bank and waits for the morning.",
    " Birds come in the evening and leave before the sun is up.",
    " Behind the hill there is a road, and the road leads to the town.",
)
NEEDLE = "\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
DIGITS = 5
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Prompts:
    """Which prompts are asked: ``samples`` of them for each context and depth, or ``limit`` for a context."""

    contexts: Sequence[int] = (1024, 2048, 4096)
    """Tokens of a prompt and its answer."""
    depths: Sequence[float] = DEPTHS
    """Places of the number in the text, 0 its start and 1 its end."""
    samples: int = 4
    limit: int | None = None
    """Prompts of a context, in all, spread over the depths."""

    def counts(self) -> dict[float, int]:
        """How many prompts each depth has; those with none are left out."""
        if self.limit is None:
            return dict.fromkeys(self.depths, self.samples)
        many = len(self.depths)
        places = Counter((2 * each + 1) * many // (2 * self.limit) for each in range(self.limit))
        return {self.depths[place]: count for place, count in sorted(places.items())}


@dataclass(frozen=True)
class PasskeyRow:
    """How often a method found the number at one depth of one context."""

    method: str
    context: int  # tokens of the prompt and the answer
    depth: float  # where the number stands, 0 the start and 1 the end
    found: int
    samples: int
    likelihood: float  # of the number's digits: mean logarithm of the probability, nats
    attend: str  # how the prompt was read
    seconds: float  # those of a prompt that several methods read together are shared

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def passkey(
    model: Any,
    tokenizer: Any,
    methods: Sequence[str | Method],
    prompts: Prompts | None = None,
    attend: str = "store",
    calibrations: Iterable[Calibration] = (),
    journal: Journal | None = None,
) -> list[PasskeyRow]:
    """Ask for a hidden number. All methods get the same prompts.

    Args:
        prompts: of which lengths and how many; None for the usual ones.
        attend: of the caches, while the prompt is read: ``store`` or ``chunk``.
        calibrations: each goes to the methods that it was made for.
        journal: keeps each row, and reports them.

    Returns:
        a row for each method, context and depth.

    Raises:
        ValueError: unknown method, no method, a calibration that is missing, a context that the model does
            not reach or that is too short for the question; raised before the first prompt.
    """
    wanted = list(dict.fromkeys(parse_method(method) for method in methods))
    prompts, journal = prompts or Prompts(), journal or Journal()
    _check(model, wanted, prompts)
    if attend not in ATTEND:
        raise ValueError(f"attend={attend!r} is not one of {', '.join(ATTEND)}")
    made = Calibrations(calibrations)
    use = {method: made.of(method) for method in wanted}
    places = {
        (context, depth): list(prompts_of(tokenizer, context, depth, count))
        for context in prompts.contexts
        for depth, count in prompts.counts().items()
    }
    total = len(wanted) * len(places)
    rows: dict[tuple[Method, int, float], PasskeyRow] = {}
    for (context, depth), asked in places.items():
        names = {method: f"{method.spec} passkey {context} at {depth} {attend}" for method in wanted}
        left = []
        for method, name in names.items():
            held = journal.runs.load(name)
            if held is None:
                left.append(method)
            else:
                rows[method, context, depth] = PasskeyRow(**held[0])
        # Through the store each method reads a prompt in its own way.
        for part in [left] if attend == "chunk" else [[method] for method in left]:
            if not part:
                continue
            heads = ", ".join(method.head for method in part)
            journal.tell(len(rows), total, f"{heads}, {context} tokens")
            started = time.perf_counter()
            answers = [
                (key, _ask(model, tokenizer, prompt, key, {m: use[m] for m in part}, attend))
                for key, prompt in asked
            ]
            seconds = (time.perf_counter() - started) / len(part)
            for method in part:
                found = sum(key == one[method].number for key, one in answers)
                likelihood = fmean(one[method].likelihood for _, one in answers)
                row = PasskeyRow(method.spec, context, depth, found, len(asked), likelihood, attend, seconds)
                rows[method, context, depth] = row
                journal.runs.save(names[method], [row.to_dict()])
    journal.tell(total, total, "")
    return [rows[method, *place] for method in wanted for place in places]


def _check(model: Any, methods: Sequence[Method], prompts: Prompts) -> None:
    if not methods:
        raise ValueError("no method to measure")
    if prompts.samples < 1:
        raise ValueError(f"{prompts.samples} samples measure nothing: at least 1 is needed")
    if any(not 0 <= depth <= 1 for depth in prompts.depths):
        raise ValueError("a depth is between 0, the start of the text, and 1, its end")
    check_context(model, max(prompts.contexts))


def prompts_of(tokenizer: Any, context: int, depth: float, samples: int) -> Iterator[tuple[str, list[int]]]:
    """Hidden numbers and their prompts (token ids). A prompt and its answer are ``context`` tokens."""
    numbers = random.Random(f"{context} {depth}")
    sentences = [_ids(tokenizer, sentence) for sentence in FILLER]
    opening, question = _ids(tokenizer, OPENING), _ids(tokenizer, QUESTION)
    for _ in range(samples):
        key = str(numbers.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        needle = _ids(tokenizer, NEEDLE.format(key=key))
        room = context - len(opening) - len(needle) - len(question) - _answer_tokens(tokenizer)
        if room < 0:
            raise ValueError(f"a context of {context} is too short: the question needs {-room} more")
        before = _filler(sentences, round(depth * room))
        after = _filler(sentences, room - len(before))
        yield key, opening + before + needle + after + question


def _filler(sentences: Sequence[list[int]], length: int) -> list[int]:
    ids: list[int] = []
    for sentence in cycle(sentences):
        if len(ids) >= length:
            return ids[:length]
        ids += sentence
    return ids


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _answer_tokens(tokenizer: Any) -> int:
    return len(_ids(tokenizer, " " + "9" * DIGITS)) + 1


@dataclass(frozen=True)
class _Answer:
    number: str | None  # the first that the model answers
    likelihood: float  # of the right one's digits


@torch.inference_mode()
def _ask(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    key: str,
    methods: Mapping[Method, Calibration | None],
    attend: str,
) -> dict[Method, _Answer]:
    """The answer of each method to one prompt."""
    ids = torch.tensor([prompt], device=home(model))
    caches = _filled(model, methods, ids[:, :-1], attend)
    right = _ids(tokenizer, f" {key}")
    return {
        method: _Answer(
            likelihood=_likelihood(model, tokenizer, copy.deepcopy(cache), ids[:, -1:], right),
            number=_number(model, tokenizer, cache, ids),
        )
        for method, cache in caches.items()
    }


def _filled(
    model: Any, methods: Mapping[Method, Calibration | None], ids: Tensor, attend: str
) -> dict[Method, AnyCache]:
    if attend == "chunk" or not all(method.causal for method in methods):
        return read_together(model, methods, ids)
    caches = {}
    for method, calibration in methods.items():
        caches[method] = cache_of(model, method, calibration, attend)
        model(ids, **{CACHE: caches[method]}, logits_to_keep=1)
    return caches


def _likelihood(model: Any, tokenizer: Any, cache: AnyCache, last: Tensor, right: Sequence[int]) -> float:
    """The logarithm of the probability of the tokens of ``right`` with digits, after ``last`` ``[1, 1]``."""
    answer = torch.tensor([right], device=last.device)
    logits = model(torch.cat([last, answer[:, :-1]], 1), **{CACHE: cache}).logits[0]
    found = logits.float().log_softmax(-1).gather(1, answer.T)[:, 0].tolist()
    digits = (re.search(r"\d", tokenizer.decode([token])) for token in right)
    return math.fsum(value for value, digit in zip(found, digits, strict=True) if digit)


def _number(model: Any, tokenizer: Any, cache: AnyCache, ids: Tensor) -> str | None:
    """The first number that the model answers to ``ids`` ``[1, T]``; None where there is none."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=_answer_tokens(tokenizer),
        do_sample=False,
        pad_token_id=0,
    )
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return next(iter(re.findall(r"\d+", text)), None)

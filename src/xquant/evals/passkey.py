"""Passkey retrieval: a number hidden in a long text is asked for at its end (KVQuant, arXiv 2401.18079,
Table 2, after Mohtashami and Jaggi, arXiv 2305.16300).

Every token of the prompt reads the packed store, and the answer is decoded greedily from it. Methods whose
codes come from a layer above cannot do that: their prompt attends to itself exactly, and only the answer
reads the store.
"""

import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch

from ..cache import KVCache
from ..calibration import Calibration
from ..calibrations import Calibrations
from ..methods import Method
from ..positions import check_context
from ..progress import Progress, silent
from ..runs import Runs
from ..spec import parse_method

OPENING = (
    "One number is hidden in the following text. Remember it, for it is asked for at the end.\n\n"
)
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
class PasskeyRow:
    """How often a method found the number at one depth of one context."""

    method: str
    context: int  # tokens of the prompt and the answer
    depth: float  # where the number stands, 0 the start and 1 the end
    found: int
    samples: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def passkey(
    model: Any,
    tokenizer: Any,
    methods: Sequence[str | Method],
    contexts: Sequence[int] = (1024, 2048, 4096),
    depths: Sequence[float] = DEPTHS,
    samples: int = 4,
    progress: Progress | None = None,
    calibrations: Iterable[Calibration] = (),
    runs: Runs | None = None,
) -> list[PasskeyRow]:
    """Ask for a hidden number, ``samples`` times for each context and depth. All methods get the same
    prompts.

    Args:
        contexts: tokens of a prompt and its answer.
        depths: places of the number in the text, 0 its start and 1 its end.
        calibrations: each goes to the methods that it was made for.
        runs: keeps the rows that are finished, and has those of a run that was stopped.

    Returns:
        a row for each method, context and depth.

    Raises:
        ValueError: unknown method, no method, a calibration that is missing, a context that the model does
            not reach or that is too short for the question; raised before the first prompt.
    """
    wanted, runs = list(dict.fromkeys(parse_method(m) for m in methods)), runs or Runs(None, {})
    _check(model, wanted, contexts, depths, samples)
    made, tell = Calibrations(calibrations), progress or silent
    use = {method: made.of(method) for method in wanted}
    prompts = {
        (context, depth): list(_prompts(tokenizer, context, depth, samples))
        for context in contexts
        for depth in depths
    }
    total = len(wanted) * len(prompts)
    rows: list[PasskeyRow] = []
    for method in wanted:
        for (context, depth), asked in prompts.items():
            name = f"{method.spec} passkey {context} at {depth}"
            held = runs.load(name)
            if held is None:
                tell(len(rows), total, f"{method.spec}, {context} tokens")
                started = time.perf_counter()
                found = sum(
                    key == _answer(model, tokenizer, prompt, method, use[method])
                    for key, prompt in asked
                )
                seconds = time.perf_counter() - started
                held = [PasskeyRow(method.spec, context, depth, found, samples, seconds).to_dict()]
                runs.save(name, held)
            rows.append(PasskeyRow(**held[0]))
    tell(total, total, "")
    return rows


def _check(
    model: Any,
    methods: Sequence[Method],
    contexts: Sequence[int],
    depths: Sequence[float],
    samples: int,
) -> None:
    if not methods:
        raise ValueError("no method to measure")
    if samples < 1:
        raise ValueError(f"{samples} samples measure nothing: at least 1 is needed")
    if any(not 0 <= depth <= 1 for depth in depths):
        raise ValueError("a depth is between 0, the start of the text, and 1, its end")
    check_context(model, max(contexts))


def _prompts(
    tokenizer: Any, context: int, depth: float, samples: int
) -> Iterator[tuple[str, list[int]]]:
    """Hidden numbers and their prompts (token ids). A prompt and its answer are ``context`` tokens."""
    numbers = random.Random(f"{context} {depth}")
    sentences = [_ids(tokenizer, sentence) for sentence in FILLER]
    opening, question = _ids(tokenizer, OPENING), _ids(tokenizer, QUESTION)
    for _ in range(samples):
        key = str(numbers.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        needle = _ids(tokenizer, NEEDLE.format(key=key))
        room = context - len(opening) - len(needle) - len(question) - _answer_tokens(tokenizer)
        if room < 0:
            raise ValueError(
                f"a context of {context} is too short: the question needs {-room} more"
            )
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


@torch.inference_mode()
def _answer(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    method: Method,
    calibration: Calibration | None,
) -> str | None:
    """The first number that the model answers; None where there is none."""
    attend = "store" if method.causal else "chunk"
    cache = KVCache(model, method, attend=attend, calibration=calibration)
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=_answer_tokens(tokenizer),
        do_sample=False,
        pad_token_id=0,
    )
    numbers = re.findall(r"\d+", tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
    return numbers[0] if numbers else None

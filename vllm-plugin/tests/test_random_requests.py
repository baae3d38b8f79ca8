"""Random requests: lengths, common beginnings and aborts, against `KVCache`; run by `make serve-stress`.

``XQUANT_REQUESTS`` says how many, 2,000 in `make serve-stress`.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_engines import VOCABULARY, Library, engine, save_tiny

REQUESTS = int(os.environ.get("XQUANT_REQUESTS", "24"))
BLOCK, MOST_NEW, AT_ONCE = 128, 24, 8
STEMS = 12


@dataclass
class Asked:
    """A request, and what vLLM said of it."""

    prompt: list[int]
    new: int
    answer: list[int]
    aborted: bool = False
    found: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    cuts: tuple[int, ...] = ()
    """Where the prompt was cut when its tokens were read."""


class Read:
    """How prompts were read: a beginning that was known as the request did that had it first, and what is
    left in one pass."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def note(self, asked: Asked) -> None:
        """Its blocks are as it has read them. Requests are noted in the order in which they began."""
        before = self._cuts[tuple(asked.prompt[: asked.found])] if asked.found else ()
        asked.cuts = (*before, asked.found) if asked.found else ()
        for end in range(asked.found + BLOCK, len(asked.prompt) + 1, BLOCK):
            self._cuts[tuple(asked.prompt[:end])] = asked.cuts


def _asked(chance: random.Random) -> list[Asked]:
    words = range(VOCABULARY)
    stems = [chance.choices(words, k=chance.randint(100, 600)) for _ in range(STEMS)]
    asked = []
    for _ in range(REQUESTS):
        stem = chance.choice(stems)
        prompt = stem[: chance.randint(1, len(stem))] + chance.choices(words, k=chance.randint(1, 99))
        if len(prompt) % BLOCK == 0:  # of such a prompt, a last block that is known is read anew
            prompt = prompt[1:]
        asked.append(Asked(prompt, chance.randint(1, MOST_NEW), []))
    return asked


def _run(llm: Any, asked: list[Asked], chance: random.Random) -> None:
    """Requests come and go as steps are taken."""
    from vllm import SamplingParams

    engine, waiting, read = llm.llm_engine, list(range(len(asked))), Read()
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < AT_ONCE and chance.random() < 0.6:
            number = waiting.pop(0)
            options = {"max_tokens": asked[number].new, "ignore_eos": True, "detokenize": False}
            given = {"prompt_token_ids": asked[number].prompt}
            engine.add_request(str(number), given, SamplingParams(temperature=0, **options))
            running.add(number)
        for out in sorted(engine.step(), key=lambda out: int(out.request_id.split("-")[0])):
            number = int(out.request_id.split("-")[0])
            one = asked[number]
            if not one.answer:
                one.found = out.num_cached_tokens or 0
                read.note(one)
            one.answer = list(out.outputs[0].token_ids)
            if out.finished:
                running.discard(number)
        for number in sorted(running):
            if asked[number].answer and chance.random() < 0.02:
                engine.abort_request([str(number)])
                asked[number].aborted = True
                running.discard(number)


@pytest.mark.parametrize("spec", ["kivi-4bit", "kivi-2bit"])
def test_random_requests_answer_as_the_library_does(tmp_path: Path, spec: str) -> None:
    folder, chance = save_tiny(tmp_path), random.Random(spec)
    known, asked = Library(folder, spec), _asked(chance)
    options = {"max_num_batched_tokens": 8192, "max_num_seqs": AT_ONCE}
    with engine(folder, spec, xquant_kernel="reference", **options) as llm:
        _run(llm, asked, chance)
        core = llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is never given out
        assert llm.llm_engine.reset_prefix_cache()
    assert any(one.found for one in asked)
    assert any(one.aborted for one in asked) or REQUESTS < 100
    assert all(one.aborted or len(one.answer) == one.new for one in asked)
    answered = [(one.prompt, one.answer, one.cuts) for one in asked]
    others = [one for one in answered if not known.gives(*one)]
    assert len(others) <= len(asked) / 50
    assert all(known.almost_gives(*one) for one in others)

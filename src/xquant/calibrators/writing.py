"""Texts that a model writes itself, for calibration where no text is given."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from .. import compat
from ..cache.growing import KVCache
from ..kernels import cpu
from ..models.weights import home
from ..positions import check_context
from ..progress import Progress, silent
from ..runs import Runs

GENERATED = "generated"
"""The name of such a text in an artifact."""
LENGTH = 512
"""Most tokens of a text. Of a small model longer ones become nonsense, and calibrate no better."""
TOKENS_AT_ONCE = 20480
"""Tokens of the texts that are written together, and kept together."""
WRITER = "kivi-4bit:group=32"
"""What holds the texts while they are written, where native kernels read it: torch takes half the time of a
step to read the full cache."""
LEAST = 1e-4
"""Probability below which no token is sampled: a small model that samples one does not return to sensible
text. Sampling from the likeliest 95% (`top_p`) leaves out as much, but sorts the vocabulary for every
token."""
OPENINGS = (
    "The history of the town goes back to",
    "In a study published last year, researchers",
    "def read_lines(path):\n    ",
    "Once upon a time there was a",
    "L'histoire de cette ville commence au",
    "import os\nimport sys\n\n\ndef main(",
    "How do I change the",
    "The company announced on Monday that",
    "= Early life =\n\n",
    "中国的历史可以追溯到",
    "Question: What is the difference between",
    'class Queue:\n    """',
    "In mathematics, a",
    "I bought this two weeks ago and",
    "في العام الماضي أعلن الباحثون",
    "According to the report,",
    "To make the dough, mix",
    "#include <stdio.h>\n\nint main(",
    "The album was released in",
    '{\n  "name": "example",\n  "version": ',
    "Dear Ms. Alvarez,",
    "It was late when the ship",
    "The species is found in",
    "function render(items) {\n  ",
    "In einer neuen Studie haben Forscher",
    "1. Introduction\n\n",
    "The match ended",
    "You will need the following:",
    "class Account:\n    ",
    "日本の首都である東京は",
    "public class Account {\n    private ",
    "His first novel,",
    "Many people believe that",
    "The river flows through",
    "В прошлом году исследователи",  # noqa: RUF001
    "During the war, the",
    "SELECT name, COUNT(*)\nFROM ",
    '"Where have you been?" she asked.',
    "The court held that",
    "서울은 대한민국의",
    "As the temperature rises,",
    "Today we are going to talk about",
    "#!/bin/bash\nset -e\n",
    "The building was designed by",
    "La empresa anunció el lunes que",
    "Let x be a number such that",
    "Travellers who visit the island",
    "The patient was treated with",
    "fn main() {\n    let ",
    "हाल के वर्षों में",
)
"""Beginnings of texts of many kinds, a fifth of them source code, a fifth in other languages or data. There
are many, since long texts of a small model become nonsense."""


class Counter(BaseStreamer):
    """A streamer for `generate`: calls ``written`` with the number of tokens that every text has so far."""

    def __init__(self, written: Callable[[int], None]) -> None:
        self.written, self.count = written, -1  # `generate` puts the prompt first

    def put(self, value: Tensor) -> None:
        self.count += 1
        self.written(self.count)

    def end(self) -> None:
        pass


class Draw(LogitsProcessor):
    """Samples, as a processor for `generate` without its own sampling: leaves the highest score to a token
    that it draws by the model's probabilities. One random number a text is enough, where `torch.multinomial`
    takes one for every word of the vocabulary."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        likely = scores.softmax(-1)
        least = likely.amax(-1, keepdim=True).clamp(max=LEAST)
        reached = likely.where(likely >= least, 0).cumsum(-1)
        part = 1 - torch.rand(len(scores), 1, device=scores.device, dtype=scores.dtype)  # above 0
        return scores.scatter(1, torch.searchsorted(reached, part * reached[:, -1:]), torch.inf)


@torch.no_grad()  # in inference mode, autocast would convert all weights at every step
def write_samples(
    model: Any,
    tokenizer: Any,
    context: int,
    windows: int,
    seed: int = 0,
    progress: Progress | None = None,
    runs: Runs | None = None,
) -> Tensor:
    """Let the model write ``windows`` samples of ``context`` tokens. A sample is a text that is written from
    one of `OPENINGS` on; one of more than `LENGTH` tokens is made of several.

    Args:
        runs: keeps the texts that are finished, and has those of a run of the same model, sizes and seed that
            was stopped.

    Returns:
        token ids ``[windows, context]``.

    Raises:
        ValueError: sizes that the model does not allow.
    """
    if context < 2 or windows < 1:
        raise ValueError(
            f"{windows} texts of {context} tokens cannot be written: at least 1 of 2 tokens is needed"
        )
    check_context(model, context)
    length = min(LENGTH, context)
    every = [tokenizer(text)["input_ids"] for text in OPENINGS]
    begin, unknown = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "unk"))
    known = [ids for ids in every if set(ids) - {begin, unknown}]  # it may not know a language
    openings = [ids[: length - 1] for ids in known or every]
    if not all(openings):
        raise ValueError("the tokenizer makes no tokens of words: give a calibration text")
    # A token that begins every text begins every sample, and stands nowhere else.
    first = openings[0][:1] if openings[0][0] == begin else []
    own = context - len(first)
    begun = list(islice(cycle(openings), -(-own * windows // (length - len(first)))))
    together = max(TOKENS_AT_ONCE // length, 1)
    starts, runs, tell = range(0, len(begun), together), runs or Runs(None, {}), progress or silent
    texts: list[list[int]] = []
    devices = [home(model)] if home(model).type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for number, start in enumerate(starts):

            def written(count: int, before: int = number * length) -> None:
                tell(before + count, len(starts) * length, "writing texts")

            name = f"texts from {start} on"
            held = runs.load(name)
            if held is None:
                ids = _continued(model, begun[start : start + together], length, written)
                held = [{"ids": ids, "random": _random_state(devices)}]
                runs.save(name, held)
            _set_random_state(devices, held[0]["random"])
            texts += held[0]["ids"]
    inner = torch.tensor(texts, device="cpu")[:, len(first) :].flatten()[: windows * own].view(windows, own)
    return torch.cat([torch.tensor(first, dtype=torch.int64, device="cpu").expand(windows, -1), inner], 1)


def _random_state(devices: list[torch.device]) -> list[list[int]]:
    """The states of the random generators of the CPU and of ``devices``, as plain numbers."""
    states = torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)
    return [state.tolist() for state in states]


def _set_random_state(devices: list[torch.device], states: list[list[int]]) -> None:
    own, *others = (torch.tensor(state, dtype=torch.uint8, device="cpu") for state in states)
    torch.set_rng_state(own)
    for device, state in zip(devices, others, strict=True):
        torch.cuda.set_rng_state(state, device)


def _writer(model: Any) -> KVCache | None:
    """The `WRITER`; None, for a cache of transformers' own, where no native kernel reads it."""
    try:
        return KVCache(model, WRITER, kernel=cpu.best().name)
    except ValueError:
        return None


def _fast_products(device: torch.device) -> torch.autocast:
    """A context in which products of fp32 weights are made in bf16, on a CPU that has instructions for that:
    in half the time, and exactly enough to write. Elsewhere nothing changes."""
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.6 has none
    bf16 = device.type == "cpu" and any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def _continued(
    model: Any, openings: list[list[int]], context: int, written: Callable[[int], None]
) -> list[list[int]]:
    """Texts of ``context`` tokens that begin with ``openings``; ``written`` is called with the number of
    tokens that were added."""
    lengths = [len(ids) for ids in openings]
    widest = max(lengths)
    ids = torch.tensor([[0] * (widest - len(i)) + i for i in openings], device=home(model))
    mask = torch.arange(widest, device="cpu")[None] >= widest - torch.tensor(lengths, device="cpu")[:, None]
    new = context - min(lengths)
    with _fast_products(home(model)):
        texts = model.generate(
            ids,
            attention_mask=mask.long().to(home(model)),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            repetition_penalty=1.0,
            logits_processor=[Draw()],
            pad_token_id=0,
            streamer=Counter(written),
            **{compat.CACHE: _writer(model)},
        )
    whole = zip(texts.tolist(), lengths, strict=True)
    return [row[widest - n : widest - n + context] for row, n in whole]

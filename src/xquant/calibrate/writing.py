"""Texts that a model writes itself, to be calibrated on where no text is given."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from .. import compat

GENERATED = "generated"
"""What an artifact calls such a text."""
TOKENS_AT_ONCE = 16384
LEAST = 1e-4
"""Probability below which no word is taken: a small model that takes one out of the rest does not find back.
Taking the likeliest that make 95% (`top_p`) sets as much aside, but sorts the vocabulary for every word."""
OPENINGS = (
    "The history of the town goes back to",
    "In a study published last year, researchers",
    "def read_lines(path):\n    ",
    "Once upon a time there was a",
    "How do I change the",
    "The company announced on Monday that",
    "= Early life =\n\n",
    "Question: What is the difference between",
    "In mathematics, a",
    "I bought this two weeks ago and",
    "According to the report,",
    "To make the dough, mix",
    "The album was released in",
    "Dear Ms. Alvarez,",
    "It was late when the ship",
    "The species is found in",
    "1. Introduction\n\n",
    "The match ended",
    "You will need the following:",
    "class Account:\n    ",
    "His first novel,",
    "Many people believe that",
    "The river flows through",
    "During the war, the",
    '"Where have you been?" she asked.',
    "The court held that",
    "As the temperature rises,",
    "Today we are going to talk about",
    "The building was designed by",
    "Let x be a number such that",
    "Travellers who visit the island",
    "The patient was treated with",
)
"""How texts of many kinds begin. Longer texts of a small model run off into nothing, so there are many."""

Progress = Callable[[int, int, str], None]


@torch.inference_mode()
def write_samples(
    model: Any,
    tokenizer: Any,
    context: int,
    windows: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """``windows`` texts of ``context`` tokens that the model writes, ``[windows, context]``, each from one of
    `OPENINGS` on.

    Raises:
        ValueError: sizes that the model does not allow.
    """
    positions = getattr(compat.text_config(model), "max_position_embeddings", None)
    if context < 2 or windows < 1 or (positions is not None and context > positions):
        raise ValueError(
            f"{windows} texts of {context} tokens cannot be written: at least 1 of 2 tokens is needed,"
            f" and the model has {positions} positions"
        )
    openings = [tokenizer(text)["input_ids"][: context - 1] for text in OPENINGS]
    if not all(openings):
        raise ValueError("the tokenizer makes no tokens of words: give a calibration text")
    begun = list(islice(cycle(openings), windows))
    together = max(TOKENS_AT_ONCE // context, 1)
    texts: list[Tensor] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for start in range(0, windows, together):
            if progress is not None:
                progress(start, windows, "writing a text")
            texts += _continued(model, begun[start : start + together], context)
    return torch.stack(texts).cpu()


def _continued(model: Any, openings: list[list[int]], context: int) -> list[Tensor]:
    """Texts of ``context`` tokens that begin so."""
    lengths = [len(ids) for ids in openings]
    widest = max(lengths)
    ids = torch.tensor([[0] * (widest - len(i)) + i for i in openings], device=model.device)
    mask = torch.arange(widest)[None] >= widest - torch.tensor(lengths)[:, None]
    new = context - min(lengths)
    written = model.generate(
        ids,
        attention_mask=mask.long().to(model.device),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        epsilon_cutoff=LEAST,
        repetition_penalty=1.0,
        pad_token_id=0,
    )
    return [row[widest - n : widest - n + context] for row, n in zip(written, lengths, strict=True)]

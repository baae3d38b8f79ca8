"""Texts that a model writes: from the openings on, of one length, the same every time."""

from typing import Any

import pytest
import torch

from support.models import tiny
from xquant.calibrators.writing import OPENINGS, write_samples


class Letters:
    """A tokenizer whose texts differ in length."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % 100 for letter in text]}


def test_texts_begin_with_the_openings_and_have_one_length() -> None:
    model, letters = tiny("llama"), Letters()
    texts = write_samples(model, letters, 50, len(OPENINGS) + 2)
    assert texts.shape == (len(OPENINGS) + 2, 50)
    for text, opening in zip(texts.tolist(), [*OPENINGS, *OPENINGS[:2]], strict=True):
        ids = letters(opening)["input_ids"]
        assert text[: len(ids)] == ids[:50]
    assert texts.min() >= 0 and texts.max() < model.config.vocab_size


def test_openings_that_are_longer_than_the_texts_are_cut() -> None:
    texts = write_samples(tiny("llama"), Letters(), 5, 3)
    assert texts[0].tolist()[:4] == Letters()(OPENINGS[0])["input_ids"][:4]


def test_the_same_seed_writes_the_same_and_leaves_randomness_alone() -> None:
    model = tiny("llama")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = write_samples(model, Letters(), 45, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(write_samples(model, Letters(), 45, 3, seed=1), first)
    assert not torch.equal(write_samples(model, Letters(), 45, 3, seed=2), first)


@pytest.mark.parametrize(("context", "windows"), [(1, 3), (10, 0)])
def test_sizes_that_cannot_be_are_refused(context: int, windows: int) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        write_samples(tiny("llama"), Letters(), context, windows)


def test_a_tokenizer_without_tokens_is_refused() -> None:
    def silent(text: str) -> Any:
        return {"input_ids": []}

    with pytest.raises(ValueError, match="makes no tokens"):
        write_samples(tiny("llama"), silent, 10, 1)

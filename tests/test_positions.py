"""Contexts past a model's positions are refused in one way."""

from types import SimpleNamespace

import pytest

from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant.calibrators.writing import write_samples
from xquant.positions import check_context, positions_of
from xquant.text import cut_windows


def test_positions_are_those_of_the_configuration() -> None:
    model = tiny("llama")
    assert positions_of(model) == 512
    check_context(model, 512)
    with pytest.raises(ValueError, match=r"^a context of 513 is past the model's 512 positions$"):
        check_context(model, 513)
    with pytest.raises(ValueError, match=r"a context of 513 \(a prompt and an answer\) is past"):
        check_context(model, 513, "a prompt and an answer")


def test_a_model_that_does_not_say_takes_any_context() -> None:
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    model = SimpleNamespace(config=config)
    assert positions_of(model) is None
    check_context(model, 10**9)


def test_texts_that_are_read_and_written_are_checked() -> None:
    model, tokenizer = tiny("llama"), word_tokenizer()
    for cut in (
        lambda: cut_windows(model, tokenizer, text_of(600), 513, 1),
        lambda: write_samples(model, tokenizer, 513, 1),
    ):
        with pytest.raises(ValueError, match="a context of 513 is past"):
            cut()

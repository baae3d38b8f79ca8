"""Texts that a model writes: from the openings on, of one length, the same every time."""

from typing import Any

import pytest
import torch

from support.models import tiny
from xquant import KVCache, compat
from xquant.calibrators.writing import LEAST, LENGTH, OPENINGS, Draw, write_samples
from xquant.kernels.cpu import library


class Letters:
    """A tokenizer whose texts differ in length."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % 100 for letter in text]}


def test_samples_are_made_of_texts_that_begin_with_the_openings() -> None:
    model, letters = tiny("llama", max_position_embeddings=2 * LENGTH), Letters()
    samples = write_samples(model, letters, LENGTH + 20, 3)
    assert samples.shape == (3, LENGTH + 20)
    texts = samples.flatten()[: 3 * LENGTH].view(3, LENGTH).tolist()
    for text, opening in zip(texts, OPENINGS, strict=False):
        ids = letters(opening)["input_ids"]
        assert text[: len(ids)] == ids
    assert samples.min() >= 0 and samples.max() < model.config.vocab_size


def test_a_token_that_begins_texts_stands_at_the_start_of_samples_alone() -> None:
    class Begun(Letters):
        bos_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, *super().__call__(text)["input_ids"]]}

    model, begun = tiny("llama", max_position_embeddings=2 * LENGTH), Begun()
    samples = write_samples(model, begun, 2 * LENGTH, 2)
    assert samples.shape == (2, 2 * LENGTH) and samples[:, 0].tolist() == [1, 1]
    stream = samples[:, 1:].flatten().tolist()
    for number in range(4):
        ids = begun(OPENINGS[number])["input_ids"][1:]
        start = number * (LENGTH - 1)
        assert stream[start : start + len(ids)] == ids


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


@pytest.mark.parametrize(("size", "ours"), [(32, True), (12, False)])
def test_native_kernels_read_the_texts_where_they_can(
    size: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = tiny("llama", head_dim=size), []
    generate = model.generate

    def noted(*args: Any, **options: Any) -> Any:
        given.append(options[compat.CACHE])
        return generate(*args, **options)

    monkeypatch.setattr(model, "generate", noted)
    assert write_samples(model, Letters(), 40, 3).shape == (3, 40)
    assert [isinstance(cache, KVCache) for cache in given] == [ours and bool(library.isas())]


@pytest.mark.parametrize(("context", "windows"), [(1, 3), (10, 0)])
def test_sizes_that_cannot_be_are_refused(context: int, windows: int) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        write_samples(tiny("llama"), Letters(), context, windows)


def test_openings_in_letters_that_a_tokenizer_does_not_know_are_left_out() -> None:
    class English:
        unk_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [2 + ord(letter) % 100 if letter.isascii() else 1 for letter in text]}

    texts = write_samples(tiny("llama"), English(), LENGTH, 10).tolist()
    begun = [English()(opening)["input_ids"] for opening in OPENINGS]
    known = [ids for ids in begun if set(ids) != {1}]
    assert len(known) < len(begun)
    for text, ids in zip(texts, known, strict=False):
        assert text[: len(ids)] == ids


def test_a_tokenizer_without_tokens_is_refused() -> None:
    def silent(text: str) -> Any:
        return {"input_ids": []}

    with pytest.raises(ValueError, match="makes no tokens"):
        write_samples(tiny("llama"), silent, 10, 1)


def drawn(likely: torch.Tensor, times: int) -> torch.Tensor:
    """How often each token is drawn by probabilities ``[V]``, of ``times``."""
    torch.manual_seed(3)
    scores = likely.log().expand(times, -1)
    return Draw()(torch.empty(times, 0), scores).argmax(-1).bincount(minlength=len(likely))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    likely = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    counts = drawn(likely, 20_000)
    assert counts[likely == 0].sum() == 0
    assert torch.allclose(counts / 20_000, likely, atol=0.015)


def test_unlikely_tokens_are_never_drawn() -> None:
    likely = torch.full((2_000,), 0.4 * LEAST)
    likely[7] = 1 - likely.sum() + likely[7]
    assert drawn(likely, 2_000).nonzero().flatten().tolist() == [7]


def test_where_no_token_is_likely_each_can_be_drawn() -> None:
    counts = drawn(torch.full((20_000,), 0.5 * LEAST), 4_000)
    assert counts[:10_000].sum() > 1_500 and counts[10_000:].sum() > 1_500

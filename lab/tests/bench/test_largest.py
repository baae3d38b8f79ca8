"""The largest batch, on a model small enough that a few sequences fill what it is given."""

from typing import Any

import pytest
import torch

from support.attention_cases import needs_flash
from support.models import tiny
from xquant import parse_method
from xquant_lab.bench import capacity, largest
from xquant_lab.bench.contenders import Compressed, Models

SPEC = "kivi-2bit:group=32"
CONTEXT = 64
ROOM = CONTEXT + 32 + largest.WARM_UP * 7
"""Tokens that a sequence of the full cache has room for, those of a block and all that is tried out."""
SEQUENCE = 5 * 2 * ROOM * 2 * 32 * 4


def found(sequences: float, specs: tuple[str, ...] = (SPEC,)) -> list[dict[str, Any]]:
    models, methods = Models(tiny("llama", head_dim=32)), [parse_method(spec) for spec in specs]
    memory = sequences * SEQUENCE / capacity.SHARE
    asked = models, methods, CONTEXT, torch.float32, "auto", memory, lambda *_: None
    return list(largest.largest_batches(*asked))


@needs_flash
def test_more_sequences_fit_where_they_are_compressed() -> None:
    full, ours = found(3.5)
    assert (full["method"], ours["method"]) == ("full", SPEC)
    assert full["batch"] == full["estimated_batch"] == 3
    assert ours["batch"] == ours["estimated_batch"] > 9
    for row in (full, ours):
        assert row["failed"] is None and row["steps"] == 32
        assert row["cache_bytes"] <= 3.5 * SEQUENCE
        rate = row["batch"] / row["ms_per_step"] * 1e3
        assert row["tokens_per_second"] == pytest.approx(rate)
    assert ours["times_full"] == ours["tokens_per_second"] / full["tokens_per_second"]
    assert full["times_full"] == 1


def test_a_batch_that_runs_out_of_memory_after_all_is_made_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    step = Compressed.step

    def limited(contender: Compressed) -> None:
        if contender.batch not in tried:
            tried.append(contender.batch)
        if contender.batch > 8:
            raise torch.OutOfMemoryError("out of memory")
        step(contender)

    monkeypatch.setattr(Compressed, "step", limited)
    row = found(3.5)[1]
    assert row["failed"] is None
    assert tried[0] == row["estimated_batch"] > tried[-1] == row["batch"] <= 8


def test_what_cannot_decode_says_why() -> None:
    full, ours = found(0.5)
    assert full["failed"] == "not one sequence fits" and full["tokens_per_second"] is None
    assert ours["failed"] is None and ours["times_full"] is None

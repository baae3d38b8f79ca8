"""The benchmark's rows, on a model small enough to be timed in a moment. Nothing asserts a time."""

import time
from collections import Counter
from typing import Any

import pytest
import torch

from models import tiny
from xquant import KVCache, parse_method
from xquant.evals.bench import (
    Full,
    Settings,
    bench,
    fill,
    random_calibration,
    read_bandwidth,
    shaped_model,
)
from xquant.methods.transform import Transform

CONTRACT = {
    *("method", "context", "batch", "ms_per_token", "attention_ms_per_layer", "cache_bytes"),
    *("speedup_vs_full", "gbytes_per_second"),
}


def rows(specs: list[str], **options: Any) -> list[dict[str, Any]]:
    methods = [parse_method(spec) for spec in specs]
    settings = Settings(context=70, rounds=2, warm_up=1, **options)
    return bench(tiny("llama", head_dim=32), methods, settings, True, lambda *_: None)


def test_a_row_for_the_full_cache_and_for_every_method() -> None:
    found = rows(["kivi-4bit:group=32", "xquant-cl-2bit:group=32"], batch=2)
    assert [row["method"] for row in found] == [
        "full",
        "kivi-4bit:group=32",
        "xquant-cl-2bit:group=32",
    ]
    for row in found:
        assert set(row) >= CONTRACT
        assert row["ms_per_token"] > 0 and row["speedup_vs_full"] > 0
        assert row["ms_min_max"][0] <= row["ms_per_token"] <= row["ms_min_max"][1]
    full = found[0]
    assert len(full["tried"]) == 4  # fp32 and bf16, sdpa and eager
    assert full["ms_per_token"] in full["tried"].values()
    assert full["speedup_vs_full"] == 1


def test_filling_gives_what_a_prefill_would_hold() -> None:
    model = tiny("llama", head_dim=32)
    filled, run = KVCache(model, "kivi-4bit:group=32"), KVCache(model, "kivi-4bit:group=32")
    fill(filled, 70, 1)
    with torch.inference_mode():
        model(torch.ones(1, 70, dtype=torch.long), past_key_values=run, use_cache=True)
    assert filled.report().cache_bytes == run.report().cache_bytes
    assert filled.get_seq_length() == run.get_seq_length() == 70


@pytest.mark.parametrize("spec", ["tc-2bit:group=32", "tc-cl-2bit:group=32"])
def test_random_numbers_are_a_calibration_too(spec: str) -> None:
    model, method = tiny("llama", head_dim=32), parse_method(spec)
    assert isinstance(method, Transform)
    cache = KVCache(model, method, calibration=random_calibration(model, method))
    fill(cache, 70, 1)
    for layer in cache.compressed:
        assert layer.stream.tokens == 64
        assert all(bool(states.isfinite().all()) for states in layer.states())


def test_shapes_are_known_by_name() -> None:
    with pytest.raises(ValueError, match=r"no shape 'llama-9'.*llama-3\.1-8b"):
        shaped_model("llama-9")


def test_settings_twice_as_slow_as_another_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: Counter[tuple[torch.dtype, str]] = Counter()

    def step(contender: Full) -> None:
        setting = contender.dtype, contender.setting
        turns[setting] += 1
        time.sleep(0.02 if setting == (torch.float32, "sdpa") else 0.2)

    monkeypatch.setattr(Full, "step", step)
    full = rows([])[0]
    assert (full["dtype"], full["kernel"]) == ("float32", "sdpa")
    assert len(full["tried"]) == 4
    assert turns.pop((torch.float32, "sdpa")) == 6  # three rounds, twice each
    assert set(turns.values()) == {2}


def test_bandwidth_is_measured() -> None:
    assert read_bandwidth() > 1e8

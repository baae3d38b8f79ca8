"""Models in vLLM of which some layers have sliding windows: these keep vLLM's own cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, MistralConfig, MistralForCausalLM

pytest.importorskip("vllm")

from support.vllm_engines import (
    LENGTHS,
    SHAPE,
    answers,
    cache_config,
    engine,
    library,
    random_prompts,
    read_from_store,
    save_gemma4,
    save_gpt_oss,
    save_mixed,
)
from xquant.serve.build import Model
from xquant.serve.capacity import room_in, stock_room
from xquant.serve.fit import wanted

PROMPTS = random_prompts(LENGTHS)
MEMORY, BATCHED = 32 << 20, 256
# Steps of fewer tokens than most prompts have: windows begin inside of them.
CHUNKS = {"max_num_batched_tokens": BATCHED, "kv_cache_memory_bytes": MEMORY}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def planned(mixed: Path) -> Model:
    return Model(AutoConfig.from_pretrained(mixed), torch.float32, str(mixed))


@pytest.fixture(scope="module")
def stock(mixed: Path, planned: Model) -> list[list[int]]:
    """What vLLM answers without xquant."""
    with engine(mixed, **CHUNKS) as llm:
        found = answers(llm, PROMPTS, 32)
        tokens = cache_config(llm).kv_cache_size_tokens
    assert tokens == stock_room(planned).tokens(MEMORY, 1024, BATCHED)
    assert sum(len(set(answer)) for answer in found) > 8 * len(found)  # no model of one word
    return found


def test_16_bits_answer_as_vllm_does(mixed: Path, stock: list[list[int]]) -> None:
    with engine(mixed, "full", disable_log_stats=False, **CHUNKS) as llm:
        assert answers(llm, PROMPTS, 32) == stock
        assert answers(llm, PROMPTS[-1:], 32) == stock[-1:]
        assert _counter(llm, "prefix_cache_hits") == 640  # five blocks of the 700 tokens


def test_preempted_requests_come_back(mixed: Path, stock: list[list[int]]) -> None:
    # 31 blocks, for requests that want up to 20: pages, a ring, and four groups of windows.
    few = {**CHUNKS, "kv_cache_memory_bytes": 4 << 20}
    with engine(mixed, "full", disable_log_stats=False, **few) as llm:
        assert answers(llm, PROMPTS, 32) == stock
        assert _counter(llm, "num_preemptions") > 0


def _counter(llm: Any, name: str) -> int:
    return next(metric for metric in llm.get_metrics() if metric.name == f"vllm:{name}").value


@pytest.mark.parametrize("spec", ["kivi-4bit", "kivi-2bit:rope=post"])
def test_answers_are_the_librarys(mixed: Path, planned: Model, spec: str) -> None:
    prompts = random_prompts([40, 300, 385], seed=1)
    own = {"kv_cache_memory_bytes": MEMORY, "max_num_batched_tokens": 1024}
    with engine(mixed, spec, xquant_kernel="reference", **own) as llm:
        found = answers(llm, prompts, 130)
        tokens = cache_config(llm).kv_cache_size_tokens
    assert found == library(mixed, spec, prompts, 130)
    assert tokens == room_in(wanted({"xquant": spec}), planned).tokens(MEMORY, 1024, 1024)


def test_chunks_and_hits_read_alike_from_the_store(mixed: Path) -> None:
    found = read_from_store(mixed, "kivi-2bit")
    assert all(each == found[0] for each in found)


def test_sinks_that_are_learned(tmp_path: Path) -> None:
    """And windows in every other layer."""
    folder = save_gpt_oss(tmp_path)
    with engine(folder, **CHUNKS) as llm:
        stock = answers(llm, PROMPTS, 32)
    assert sum(len(set(answer)) for answer in stock) > 8 * len(stock)
    for kernel in ("auto", "reference"):
        with engine(folder, "full", xquant_kernel=kernel, **CHUNKS) as llm:
            assert answers(llm, PROMPTS, 32) == stock
    prompts = random_prompts([40, 300], seed=1)
    for spec in ("kivi-4bit:rope=post", "kivi-4bit"):
        with engine(folder, spec, xquant_kernel="reference") as llm:
            assert answers(llm, prompts, 40) == library(folder, spec, prompts, 40)


def test_heads_of_unequal_size(tmp_path: Path) -> None:
    folder = save_gemma4(tmp_path)
    known = Model(AutoConfig.from_pretrained(folder), torch.float32, str(folder))
    with engine(folder, **CHUNKS) as llm:
        stock, tokens = answers(llm, PROMPTS, 32), cache_config(llm).kv_cache_size_tokens
    assert tokens == stock_room(known).tokens(MEMORY, 1024, BATCHED)
    assert sum(len(set(answer)) for answer in stock) > 8 * len(stock)
    with engine(folder, "full", **CHUNKS) as llm:
        assert answers(llm, PROMPTS, 32) == stock
    prompts = random_prompts([40, 300], seed=1)
    whole = {**CHUNKS, "max_num_batched_tokens": 1024}
    for spec in ("kivi-4bit:rope=post", "kivi-4bit"):
        with engine(folder, spec, xquant_kernel="reference", **whole) as llm:
            assert answers(llm, prompts, 40) == library(folder, spec, prompts, 40)
            tokens = cache_config(llm).kv_cache_size_tokens
        assert tokens == room_in(wanted({"xquant": spec}), known).tokens(MEMORY, 1024, 1024)


def test_windows_alone_are_refused(mixed: Path, tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": 64})).save_pretrained(tmp_path)
    _refused("no full-attention layer to compress", tmp_path)
    _refused("disable_hybrid_kv_cache_manager", mixed, disable_hybrid_kv_cache_manager=True)


def _refused(why: str, folder: Path, **options: Any) -> None:
    with pytest.raises(ValueError, match=why) as error, engine(folder, "kivi-4bit", **options):
        pass
    assert str(error.value).startswith("xquant: ")
    assert "\n" not in str(error.value)

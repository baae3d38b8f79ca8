"""Models in vLLM whose layers keep a state, alone or beside keys and values: vLLM keeps that itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("vllm")

from support.vllm_engines import (
    LENGTHS,
    Library,
    answers,
    cache_config,
    configured,
    connector,
    engine,
    hits,
    kept,
    logprobs,
    random_prompts,
    save_falcon_h1,
    save_granite,
    save_qwen3_5,
    save_qwen3_next,
)
from xquant.serve import fit
from xquant.serve.build import Model
from xquant.serve.capacity import room_in, stock_room

PROMPTS = random_prompts(LENGTHS)
MEMORY, BATCHED = 32 << 20, 256
CHUNKS = {"max_num_batched_tokens": BATCHED, "kv_cache_memory_bytes": MEMORY, "enable_prefix_caching": False}
SHORT = {**CHUNKS, "dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
"""Some CPUs' states are fp32 if nothing is said, and blocks then longer than any prompt here."""


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_granite(tmp_path_factory.mktemp("granite"))


@pytest.fixture(scope="module")
def stock(granite: Path) -> list[list[int]]:
    """What vLLM answers without xquant."""
    with engine(granite, **CHUNKS) as llm:
        found = answers(llm, PROMPTS, 32)
        tokens = cache_config(llm).kv_cache_size_tokens
    assert tokens == stock_room(_known(granite)).tokens(MEMORY, 1024, BATCHED)
    assert sum(len(set(answer)) for answer in found) > 8 * len(found)  # no model of one word
    return found


@pytest.fixture(scope="module", params=[save_qwen3_next, save_qwen3_5], ids=["qwen3_next", "qwen3_5"])
def linear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model most of whose layers are linear attention, which on a CPU vLLM has in bf16 alone."""
    if request.param is save_qwen3_5:
        pytest.importorskip("torchvision", reason="vLLM wants it for the pictures of Qwen3.5")
    found: Path = request.param(tmp_path_factory.mktemp("linear"))
    return found


def _known(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return Model(AutoConfig.from_pretrained(folder), dtype, str(folder))


def test_16_bits_answer_as_vllm_does(granite: Path, stock: list[list[int]]) -> None:
    with engine(granite, "full", **CHUNKS) as llm:
        assert answers(llm, PROMPTS, 32) == stock


def test_a_state_in_every_layer(tmp_path: Path) -> None:
    folder, found = save_falcon_h1(tmp_path), []
    for spec in (None, "full", "kivi-4bit"):
        with engine(folder, spec, **CHUNKS) as llm:
            found.append(answers(llm, PROMPTS, 32))
    assert found[0] == found[1] != found[2]


def test_preempted_requests_come_back(granite: Path, stock: list[list[int]]) -> None:
    few = {**CHUNKS, "kv_cache_memory_bytes": 2 << 20, "disable_log_stats": False}
    with engine(granite, "full", **few) as llm:
        assert answers(llm, PROMPTS, 32) == stock
        assert hits(llm, "num_preemptions") > 0


@pytest.mark.parametrize("spec", ["kivi-4bit", "kivi-2bit:rope=post"])
def test_answers_are_the_librarys(granite: Path, spec: str) -> None:
    prompts, known, asked = (
        random_prompts([40, 300, 385], seed=1),
        _known(granite),
        fit.wanted({"xquant": spec}),
    )
    own = {**CHUNKS, "max_num_batched_tokens": 1024}
    with engine(granite, spec, xquant_kernel="reference", **own) as llm:
        found = answers(llm, prompts, 64)
        tokens = cache_config(llm).kv_cache_size_tokens
    library = Library(granite, spec)
    given = [library.gives(*each) for each in zip(prompts, found, strict=True)]
    near = [library.almost_gives(*each) for each in zip(prompts, found, strict=True)]
    assert all(near) and sum(given) > 1
    assert tokens == room_in(asked, known).tokens(MEMORY, 1024, 1024)


def test_linear_attention(linear: Path) -> None:
    """No prompt is cut, since that rounds otherwise."""
    own_options = {**CHUNKS, "dtype": "bfloat16", "max_num_batched_tokens": 1024}
    known, found = _known(linear, torch.bfloat16), []
    for spec in (None, "full", "kivi-2bit"):
        with engine(linear, spec, **own_options) as llm:
            found.append(answers(llm, PROMPTS, 32))
            room = stock_room(known) if spec is None else room_in(fit.wanted({"xquant": spec}), known)
            assert cache_config(llm).kv_cache_size_tokens == room.tokens(MEMORY, 1024, 1024)
    # In bf16 the library's attention and vLLM's round otherwise, which may decide between two words.
    apart = [
        (prompt + stock[:at], stock[at], own[at])
        for prompt, stock, own in zip(PROMPTS, *found[:2], strict=True)
        for at in [at for at in range(32) if stock[at] != own[at]][:1]
    ]
    assert len(apart) < 4
    if apart:
        with engine(linear, **own_options) as llm:
            each = logprobs(llm, [text for text, _, _ in apart], 1)
        for (_, word, other), (known_words,) in zip(apart, each, strict=True):
            assert abs(known_words[word] - known_words[other]) < 0.25
    assert sum(own != stock for stock, own in zip(found[0], found[2], strict=True)) > 4
    assert sum(len(set(answer)) for answer in found[0]) > 8 * len(PROMPTS)  # no model of one word


def test_prefixes_are_found_again_with_their_states(linear: Path) -> None:
    """vLLM keeps states where its blocks end, which are longer without xquant, and cuts prompts there."""
    own = {**SHORT, "enable_prefix_caching": True, "disable_log_stats": False}
    found = []
    for spec in (None, "full"):
        with engine(linear, spec, **own) as llm:
            found += [logprobs(llm, PROMPTS, 1), logprobs(llm, PROMPTS, 1)]
            assert hits(llm, "prefix_cache_hits") > 0
    for each in found[1:]:
        for (first,), (other,) in zip(found[0], each, strict=True):
            near = [abs(first[word] - other[word]) < 0.25 for word in first.keys() & other.keys()]
            assert len(near) > 1 and all(near)


FOUND = sum((length - 1) // 128 * 128 for length in LENGTHS)
ALONE = {**SHORT, "enable_prefix_caching": True, "disable_log_stats": False}
ALONE |= {"max_num_seqs": 1, "kv_cache_memory_bytes": 128 << 20}
"""Prompts one after the other, as in bf16 the number of rows rounds otherwise."""


def test_another_engine_goes_on_from_the_states_at_the_ends_of_prompts(linear: Path, tmp_path: Path) -> None:
    """As one does that finds them in its own memory."""
    with engine(linear, "full", **ALONE) as llm:
        answers(llm, PROMPTS, 1)
        want = answers(llm, PROMPTS, 16)
        assert hits(llm, "prefix_cache_hits") == FOUND
    stored = {**ALONE, **kept(tmp_path / "s", state_bits=32)}
    for found, new in ((0, 1), (FOUND, 16)):
        with engine(linear, "full", **stored) as llm:
            given = answers(llm, PROMPTS, new)
            assert hits(llm) == found
    assert given == want


@pytest.mark.filterwarnings("ignore:.* is damaged")
def test_states_lie_as_far_apart_as_is_asked(linear: Path, tmp_path: Path) -> None:
    """From the last one that two prompts have in common the second goes on, if it is whole."""
    [prompt, other] = random_prompts([700, 100], seed=3)
    branch = prompt[:600] + other
    with engine(linear, "full", **ALONE) as llm:
        want = answers(llm, [branch], 16)
    for every, there in ((8192, 0), (256, 512)):
        stored = {**ALONE, **kept(tmp_path / str(every), every=every, state_bits=32)}
        with engine(linear, "full", **stored) as llm:
            answers(llm, [prompt], 1)
        with engine(linear, "full", **stored) as llm:
            found = answers(llm, [branch], 16)
            assert hits(llm) == there
    assert found == want
    parts = sorted((tmp_path / "256").glob("*.safetensors"), key=lambda file: file.stat().st_size)[-4:]
    for part in parts:
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    with engine(linear, "full", **stored) as llm:
        answers(llm, [branch], 16)
        assert hits(llm) == 0


def test_what_is_not_served_is_refused(granite: Path, tmp_path: Path) -> None:
    transfer: dict[str, Any] = {**connector(tmp_path), "enable_prefix_caching": True}
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    for options, given, why in (
        ({"xquant_attend": "store"}, {}, "states beside attention"),
        ({}, {**transfer, "enable_prefix_caching": False}, "without prefix caching"),
        ({}, {**transfer, "speculative_config": drafts}, "speculative decoding"),
    ):
        with pytest.raises(ValueError, match=f"^xquant: .*{why}"):
            configured(granite, additional_config={"xquant": "kivi-4bit", **options}, **given)


def test_states_are_loaded_where_memory_is_short(linear: Path, tmp_path: Path) -> None:
    """vLLM counts one block where it takes two, of the state that is loaded and of the step's."""
    stored = {**ALONE, **kept(tmp_path / "s", state_bits=32), "max_num_seqs": 8}
    with engine(linear, "full", **stored) as llm:
        answers(llm, PROMPTS, 1)
    with engine(linear, "full", **{**stored, "kv_cache_memory_bytes": 6 << 20}) as llm:
        assert [len(each) for each in answers(llm, PROMPTS, 64)] == [64] * len(PROMPTS)
        assert hits(llm) >= FOUND
        assert hits(llm, "num_preemptions") > 0

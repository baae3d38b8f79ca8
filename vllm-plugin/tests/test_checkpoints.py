"""The connector and layers with sliding windows: a prompt goes on from a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.vllm_engines import (
    LENGTHS,
    answers,
    engine,
    hits,
    kept,
    random_prompts,
    save_gpt_oss,
    save_mixed,
)

PROMPTS = random_prompts(LENGTHS)
FOUND = sum((length - 1) // 128 * 128 for length in LENGTHS)
CHUNKS = {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 32 << 20}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize("save", [save_mixed, save_gpt_oss])
def test_another_engine_goes_on_from_the_ends_of_prompts(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = save(tmp_path / "model")
    with engine(model, **CHUNKS) as llm:
        stock = answers(llm, PROMPTS, 32)
    for found in (0, FOUND):
        with engine(model, "full", **kept(tmp_path / "s", state_bits=32), **CHUNKS) as llm:
            assert answers(llm, PROMPTS, 32) == stock
            assert hits(llm) == found


def test_checkpoints_lie_as_far_apart_as_is_asked(mixed: Path, tmp_path: Path) -> None:
    """From the last one that two prompts have in common the second goes on."""
    [prompt, other] = random_prompts([700, 100], seed=3)
    branch = prompt[:600] + other
    with engine(mixed, **CHUNKS) as llm:
        stock = answers(llm, [branch], 16)
    sizes = []
    for every, found in ((8192, 0), (384, 384), (256, 512)):
        folder, options = tmp_path / str(every), {**CHUNKS, "max_num_batched_tokens": 1024}
        with engine(mixed, "full", **kept(folder, every=every, state_bits=32), **options) as llm:
            answers(llm, [prompt], 1)
        sizes.append(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
        with engine(mixed, "full", **kept(folder, every=every, state_bits=32), **options) as llm:
            assert answers(llm, [branch], 16) == stock
            assert hits(llm) == found
    assert sizes[0] < sizes[1] < sizes[2]


def test_requests_that_come_back_find_what_they_stored(mixed: Path, tmp_path: Path) -> None:
    few, found = {**CHUNKS, "kv_cache_memory_bytes": 4 << 20}, []
    with engine(mixed, **CHUNKS) as llm:
        stock = answers(llm, PROMPTS, 32)
    for _ in range(2):
        with engine(mixed, "full", **kept(tmp_path / "s", every=128, state_bits=32), **few) as llm:
            assert answers(llm, PROMPTS, 32) == stock
            assert hits(llm, "num_preemptions") > 0
            found.append(hits(llm))
    assert found[1] >= FOUND


@pytest.mark.filterwarnings("ignore:.* is damaged")
def test_a_part_that_is_damaged_or_gone_is_computed(mixed: Path, tmp_path: Path) -> None:
    """An earlier checkpoint is found, or none."""
    [prompt] = random_prompts([700], seed=3)
    options = kept(tmp_path / "s", every=256, state_bits=32)
    with engine(mixed, "full", **options) as llm:
        want = answers(llm, [prompt], 8)
    files = set((tmp_path / "s").glob("*.safetensors"))
    assert len(files) == 5 + 3  # what windows of 100 reach back to after 256, 512 and 640 tokens
    parts, found = sorted(files, key=lambda file: file.stat().st_size)[-3:], set()
    for part in parts:
        whole = part.read_bytes()
        for content in (None, whole[:-1] + bytes([whole[-1] ^ 1])):
            if content is None:
                part.unlink()
            else:
                part.write_bytes(content)
            with engine(mixed, "full", **options) as llm:
                assert answers(llm, [prompt], 8) == want
                found.add(hits(llm))
            part.write_bytes(whole)
    assert found == {512, 640}


def test_states_in_8_bits_take_half(mixed: Path, tmp_path: Path) -> None:
    [prompt] = random_prompts([700], seed=3)
    sizes, own = [], {"dtype": "bfloat16"}
    for bits in (16, 8):
        with engine(mixed, "kivi-4bit", **kept(tmp_path / str(bits), state_bits=bits), **own) as llm:
            answers(llm, [prompt], 1)
        with engine(mixed, "kivi-4bit", **kept(tmp_path / str(bits), state_bits=bits), **own) as llm:
            answers(llm, [prompt], 8)
            assert hits(llm) == 640
        sizes.append(max(file.stat().st_size for file in (tmp_path / str(bits)).glob("*.safetensors")))
    assert sizes[1] < 0.56 * sizes[0]

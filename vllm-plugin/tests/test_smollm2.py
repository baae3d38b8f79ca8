"""The plugin in vLLM on SmolLM2, by native kernels; run by `make serve-test`."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_engines import LENGTHS, Library, answers, calibrated, engine, random_prompts
from xquant import load_model, parse_method
from xquant.load import packaged_folder
from xquant.text import read_text

pytestmark = pytest.mark.smollm2
WORDS = 40000
"""Of the model's, in random prompts."""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return packaged_folder()


@pytest.fixture(scope="module")
def text() -> list[int]:
    _, tokenizer = load_model("smollm2")
    ids = tokenizer(read_text("help-topics"), add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids)


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "kivi-4bit",
        "kivi-4bit:rope=post",
        "kivi-3bit",
        "kivi-3bit:rope=post",
        "kivi-2bit",
        "kivi-2bit:rope=post",
        "kvquant-3bit-1%",
        "tc-2bit",
    ],
)
def test_answers_are_the_librarys(smollm2: Path, text: list[int], spec: str, tmp_path: Path) -> None:
    prompt, made, own = text[20000:20300], None, {}  # blocks are sealed four times
    if parse_method(spec).needs_calibration:
        samples = torch.tensor(text[: 16 * 512]).view(16, 512)
        made, own["xquant_calibration"] = calibrated(smollm2, spec, samples, tmp_path)
    with engine(smollm2, spec, kv_cache_memory_bytes=256 << 20, **own) as llm:
        (found,) = answers(llm, [prompt], 256)
    known = Library(smollm2, spec, "auto", made)
    assert known.gives(prompt, found) or known.almost_gives(prompt, found)


def test_three_shards_answer_as_vllm_does(smollm2: Path) -> None:
    prompts, options = random_prompts([40, 300], seed=9, vocabulary=WORDS), {"max_num_seqs": 2}
    with engine(smollm2, kv_cache_memory_bytes=64 << 20, **options) as llm:
        stock = answers(llm, prompts, 16)
    memory = {"kv_cache_memory_bytes": 64 << 20, "tensor_parallel_size": 3}
    with engine(smollm2, "full", **memory, **options) as llm:
        assert answers(llm, prompts, 16) == stock


def test_16_bits_answer_as_vllm_does(smollm2: Path) -> None:
    prompts = random_prompts(LENGTHS, seed=3, vocabulary=WORDS)
    found = []
    for spec in (None, "full"):
        with engine(smollm2, spec, kv_cache_memory_bytes=256 << 20) as llm:
            found.append(answers(llm, prompts, 16))
    assert found[0] == found[1]

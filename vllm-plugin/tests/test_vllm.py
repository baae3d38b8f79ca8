"""The plugin in vLLM; run by `make serve-test` in an environment that has it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

pytest.importorskip("vllm")

from support.vllm_engines import (
    LENGTHS,
    VOCABULARY,
    Library,
    answers,
    cache_config,
    calibrated,
    engine,
    library,
    random_prompts,
    read_from_store,
    save_adapter,
    save_tiny,
)
from xquant import Calibration
from xquant.serve.build import Model
from xquant.serve.capacity import room_in, stock_room
from xquant.serve.fit import wanted
from xquant_vllm import guard


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stock(tiny: Path) -> list[list[int]]:
    """What vLLM answers without xquant."""
    with engine(tiny) as llm:
        return answers(llm, random_prompts(LENGTHS), 32)


def test_16_bits_answer_as_vllm_does(tiny: Path, stock: list[list[int]]) -> None:
    with engine(tiny, "full") as llm:
        assert answers(llm, random_prompts(LENGTHS), 32) == stock


def test_chunks_that_cut_blocks_change_nothing(tiny: Path, stock: list[list[int]]) -> None:
    options = {"max_num_batched_tokens": 83, "max_num_seqs": 4}
    with engine(tiny, "full", **options) as llm:
        assert answers(llm, random_prompts(LENGTHS), 32) == stock


def test_a_common_past_is_read_again(tiny: Path, stock: list[list[int]]) -> None:
    with engine(tiny, "full", disable_log_stats=False) as llm:
        long = random_prompts(LENGTHS)[-1]
        before = answers(llm, [long], 32)
        assert before == stock[-1:]
        assert answers(llm, [long], 32) == before
        assert _hits(llm) == 640  # five blocks of the 700 tokens


def test_a_common_past_is_found_beside_recent_tokens(tiny: Path) -> None:
    """Rings are longer than pages then, and vLLM looks where both end."""
    with engine(tiny, "kivi-4bit:tail=32", disable_log_stats=False) as llm:
        prompt = random_prompts(LENGTHS)[-1]
        answers(llm, [prompt], 4)
        answers(llm, [prompt], 4)
        assert _hits(llm) == 640


def _hits(llm: Any) -> float:
    """Tokens that were found."""
    (found,) = (m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
    return found.value


def test_preempted_requests_come_back(tiny: Path, stock: list[list[int]]) -> None:
    # 14 blocks of 128 tokens, for requests that want up to 6 and a ring of each layer.
    with engine(tiny, "full", kv_cache_memory_bytes=5 << 20, disable_log_stats=False) as llm:
        assert answers(llm, random_prompts(LENGTHS), 32) == stock
        counters = {metric.name: metric for metric in llm.get_metrics()}
        assert counters["vllm:num_preemptions"].value > 0


@pytest.mark.parametrize(
    "spec",
    [
        "kivi-4bit",
        "kivi-4bit:rope=post",
        "kivi-2bit",
        "kivi-3bit:layers=1x8+k4v3",
        "int4:group=64",
        "pairs-3bit",
        "e8-2bit",
        "asymkv-1.5bit",  # with recent tokens as they are
    ],
)
def test_answers_are_the_librarys(tiny: Path, spec: str) -> None:
    """In torch: kernels round otherwise, and a random model shows it. They have their test on SmolLM2. Some
    CPU may round one of a thousand tokens to another."""
    prompts, known = random_prompts([40, 140, 300, 385], seed=1), Library(tiny, spec)
    with engine(tiny, spec, xquant_kernel="reference") as llm:
        found = zip(prompts, answers(llm, prompts, 256), strict=True)
    others = [each for each in found if not known.gives(*each)]
    assert len(others) < 2 and all(known.almost_gives(*each) for each in others)


def test_layers_with_rings_in_one_pool_read_their_own(tmp_path: Path) -> None:
    """vLLM puts the rings of some layers into one pool, and these take turns with others."""
    deep, prompts = save_tiny(tmp_path, num_hidden_layers=20), random_prompts([300, 140], seed=1)
    known = Library(deep, "kivi-4bit", "auto")
    with engine(deep, "kivi-4bit") as llm:
        for each in zip(prompts, answers(llm, prompts, 8), strict=True):
            assert known.gives(*each) or known.almost_gives(*each)


def test_chunks_and_hits_read_alike_from_the_store(tiny: Path) -> None:
    """To the bit."""
    found = read_from_store(tiny, "kivi-2bit")
    assert all(each == found[0] for each in found)


def _kept(model: Path, spec: str, folder: Path) -> tuple[Calibration, str]:
    # Enough that other tokens have no more outliers than a page has room for.
    return calibrated(model, spec, torch.tensor(random_prompts([128] * 16, seed=11)), folder)


def test_a_calibration_is_served(tiny: Path, tmp_path: Path) -> None:
    made = _kept(tiny, "kvquant-3bit-1%", tmp_path)
    own = {"xquant_kernel": "reference", "xquant_calibration": made[1]}
    prompts = random_prompts([40, 300], seed=5)
    with engine(tiny, "kvquant-3bit-1%", **own) as llm:
        served = answers(llm, prompts, 130)
    assert served == library(tiny, "kvquant-3bit-1%", prompts, 130, made=made[0])


def test_sinks_are_found_again_with_their_page(tiny: Path, tmp_path: Path) -> None:
    """A request that finds a prefix has a ring of its own, and the sinks of another."""
    made = _kept(tiny, "tc-2bit", tmp_path)
    stem, ends = random_prompts([300], seed=7)[0], random_prompts([40, 90], seed=8)
    prompts = [stem[:256] + end for end in ends]
    with engine(tiny, "tc-2bit", xquant_kernel="reference", xquant_calibration=made[1]) as llm:
        first, second = (answers(llm, [prompt], 130)[0] for prompt in prompts)
    known, second_of = Library(tiny, "tc-2bit", made=made[0]), (prompts[1], second)
    assert known.almost_gives(prompts[0], first) and known.almost_gives(*second_of, (256,))
    assert not known.almost_gives(*second_of)  # read as one that finds nothing


def test_two_shards_answer_as_vllm_does(tmp_path: Path) -> None:
    folder, prompts = save_tiny(tmp_path, num_key_value_heads=4), random_prompts(LENGTHS[::4])
    with engine(folder) as llm:
        stock = answers(llm, prompts, 16)
    with engine(folder, "full", tensor_parallel_size=2) as llm:
        assert answers(llm, prompts, 16) == stock


def test_two_shards_answer_as_one_process(tiny: Path) -> None:
    """With ranges of a token that end at heads. The sums of two processes round otherwise, which a random
    model shows after some hundred tokens."""
    prompts, own = random_prompts([40, 300], seed=6), {"xquant_ranges": "heads"}
    found = []
    for shards in (1, 2):
        with engine(tiny, "kivi-4bit", tensor_parallel_size=shards, **own) as llm:
            found.append(answers(llm, prompts, 48))
    assert found[0] == found[1]


def test_memory_holds_as_many_tokens_as_are_planned(tiny: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny)
    model, memory = Model(config, torch.float32, str(tiny)), {"kv_cache_memory_bytes": 32 << 20}
    with engine(tiny, **memory) as llm:
        stock = cache_config(llm).kv_cache_size_tokens
    assert stock == stock_room(model).tokens(32 << 20, 1024)
    for spec in ("kivi-4bit", "tc-2bit"):
        own: dict[str, Any] = {}
        if spec == "tc-2bit":  # whose pages differ from layer to layer
            own["xquant_calibration"] = _kept(tiny, spec, tmp_path)[1]
        with engine(tiny, spec, **own, **memory) as llm:
            packed = cache_config(llm).kv_cache_size_tokens
        room = room_in(wanted({"xquant": spec, **own}), model)
        assert packed == room.tokens(32 << 20, 1024)
        # The rings of so small a model take as much room as its pages.
        assert packed > 2.5 * stock


def test_a_calibration_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    made, file = _kept(tiny, "tc-2bit", tmp_path)
    replace(made, model="another").save(file)
    _refused("another model", tiny, "tc-2bit", xquant_calibration=file)


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ("kivi-9bit", {}, "kivi: bits=9"),
        ("kivi-4bit:sink=129", {}, "129 sinks are more than the 128 tokens"),
        ("kivi-4bit", {"xquant_attend": "codes"}, "chunk or store, not 'codes'"),
        ("kivi-4bit", {"xquant_kernels": "auto"}, "no option 'xquant_kernels'"),
        ("xquant-cl-2bit", {}, "docs/at-rest.md"),
        ("kivi-4bit", {"block_size": 64}, "block_size is 64"),
        ("kivi-4bit", {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_what_cannot_be_served_is_refused(tiny: Path, spec: str, options: dict[str, Any], why: str) -> None:
    _refused(why, tiny, spec, **options)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=VOCABULARY, n_positions=1024)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    _refused("a model without rotary embedding is not served yet", tmp_path, "kivi-4bit")


def test_keys_that_cannot_be_turned_back_are_refused(tmp_path: Path) -> None:
    """vLLM's embedding of two sets of frequencies has no table of positions."""
    factors = [1.0] * 16  # a pair of channels each
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors}
    rope |= {"long_factor": factors, "original_max_position_embeddings": 1024}
    folder = save_tiny(tmp_path, rope_parameters=rope)
    _refused("keys before Phi3LongRoPEScaledRotaryEmbedding cannot be had", folder, "kivi-4bit")


def test_another_version_of_vllm_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    monkeypatch.setattr(guard, "version", lambda: "0.99.1")
    guard.install()
    _refused("vLLM 0.32 is supported, and 0.99.1 is installed", tiny, "kivi-4bit")


def _refused(why: str, folder: Path, spec: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=why) as error, engine(folder, spec, **options):
        pass
    assert str(error.value).startswith("xquant: ")
    assert "\n" not in str(error.value)


def test_adapters_answer_as_vllm_does(tiny: Path, stock: list[list[int]], tmp_path: Path) -> None:
    """Prompts with one adapter, with another and with none, in one batch. Those with none are not compared
    with `stock`: on a CPU, vLLM's own answers to them are others in such a batch than alone."""
    from vllm.lora.request import LoRARequest

    each = [
        LoRARequest(name, i, str(save_adapter(tmp_path / name, i))) for i, name in enumerate(("a", "b"), 1)
    ]
    prompts = random_prompts(LENGTHS)
    asked = [None if i % 3 == 2 else each[i % 3] for i in range(len(prompts))]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    found = []
    for spec in (None, "full"):
        with engine(tiny, spec, **options) as llm:
            found.append(answers(llm, prompts, 32, asked))
    assert found[0] == found[1]
    assert all(own != plain for own, plain in zip(found[0][::3], stock[::3], strict=True))

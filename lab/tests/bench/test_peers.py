"""Caches of other packages as contenders, by stand-ins for those packages. Nothing asserts a time."""

import ctypes
import gc
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.models import tiny
from xquant_lab.bench import llama_cpp, onnx_runtime, openvino, peers
from xquant_lab.bench.contenders import Full, Models, Peer
from xquant_lab.bench.run import bench
from xquant_lab.bench.trials import Settings
from xquant_lab.verbs.bench_tables import print_rows

CONTEXT = 700


def network() -> Any:
    return tiny("llama", head_dim=32)


def names(makers: dict[str, Any]) -> Counter[str]:
    return Counter(getattr(maker, "func", maker).__name__ for maker in makers.values())


def test_peers_are_those_whose_packages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_installed", lambda package: True)
    every = {"Quantized": 2, "LlamaCpp": 4, "OpenVino": 3, "OnnxRuntime": 1}
    assert names(peers.available("smollm2", network())) == every
    assert names(peers.available("another", network())) == {"Quantized": 2}
    assert names(peers.available("smollm2", network(), batch=2)) == {"Quantized": 2}
    monkeypatch.setattr(peers, "_installed", lambda package: package == "llama_cpp")
    assert names(peers.available("smollm2", network())) == {"LlamaCpp": 4}
    monkeypatch.setattr(peers, "_installed", lambda package: package == "openvino_genai")
    assert not peers.available("smollm2", network())


class Sleeper(Peer):
    """Takes so many seconds a step."""

    model, dtype, cache_bytes, _batch = None, torch.float16, 5, 1

    def __init__(self, name: str, setting: str, seconds: float) -> None:
        self.name, self.setting, self.seconds, self.turns = name, setting, seconds, 0

    def step(self) -> None:
        self.turns += 1
        time.sleep(self.seconds)


def test_a_peer_far_slower_than_the_full_cache_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Full, "step", lambda full: time.sleep(0.01))
    every = [
        Sleeper("far", "one", 0.3),
        Sleeper("far", "other", 0.2),
        Sleeper("near", "one", 0.02),
        Sleeper("near", "other", 0.2),
    ]
    settings = Settings(context=70, rounds=2, warm_up=1)
    makers = {f"{each.name}, {each.setting}": lambda settings, each=each: each for each in every}
    rows = bench(Models(network()), [], settings, lambda *_: None, (), makers)
    assert [each.turns for each in every] == [2, 2, settings.steps, 2]
    full, far, near = rows
    assert full["dropped"] is None and near["dropped"] is None
    assert near["kernel"] == "one" and near["ms_per_token"] > 0
    assert far["ms_per_token"] is None and far["failed"] is None
    assert far["dropped"].startswith("dropped after the warm-up: 2")  # the faster one, in ms
    assert far["cache_bytes"] == 5
    print_rows(rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "dropped" in line] == [f"far, 70 tokens, batch 1: {far['dropped']}"]


class Cells:
    """What of a context of llama.cpp matters here: which sequences hold each cell, and at what position."""

    def __init__(self) -> None:
        self.held: list[tuple[set[int], int]] = []

    def of(self, sequence: int) -> list[int]:
        return [position for owners, position in self.held if sequence in owners]

    def remove(self, sequence: int, first: int, last: int) -> None:
        for owners, position in self.held:
            if position >= first and (last < 0 or position < last):
                owners.discard(sequence)
        self.held = [cell for cell in self.held if cell[0]]


class Library(SimpleNamespace):
    """A stand-in for the module ``llama_cpp``, of one context."""

    __version__ = "1.2"
    LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_DISABLED = 1, 0
    GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 = 1, 8, 2
    llama_context_default_params = SimpleNamespace
    llama_free = staticmethod(lambda cells: cells.held.clear())

    def __init__(self) -> None:
        super().__init__(cells=Cells(), most=0, asked=None)

    def llama_init_from_model(self, weights: object, asked: Any) -> Cells:
        self.asked = asked
        return self.cells

    def llama_decode(self, cells: Cells, ids: list[int]) -> int:
        start = max(cells.of(0), default=-1) + 1
        cells.held += [({0}, start + i) for i in range(len(ids))]
        return 0

    def llama_batch_get_one(self, tokens: Any, count: int) -> list[int]:
        return list(tokens[:count])

    def llama_synchronize(self, cells: Cells) -> None: ...

    def llama_get_memory(self, cells: Cells) -> Cells:
        return cells

    def llama_state_seq_get_size(self, cells: Cells, sequence: int) -> int:
        return len(cells.of(sequence))

    def llama_state_seq_get_data(self, cells: Cells, state: Any, size: int, sequence: int) -> None: ...

    def llama_state_seq_set_data(self, cells: Cells, state: Any, size: int, sequence: int) -> int:
        assert not cells.of(sequence)
        cells.held += [({sequence}, i) for i in range(size)]
        self.most = max(self.most, len(cells.held))
        return size

    def llama_memory_seq_rm(self, cells: Cells, sequence: int, first: int, last: int) -> None:
        cells.remove(sequence, first, last)

    def llama_memory_seq_add(self, cells: Cells, sequence: int, first: int, last: int, by: int) -> None:
        cells.held = [(own, at + by if sequence in own else at) for own, at in cells.held]

    def llama_memory_seq_cp(self, cells: Cells, source: int, target: int, first: int, last: int) -> None:
        for owners, _ in cells.held:
            if source in owners:
                owners.add(target)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    found.llama_token = ctypes.c_int32
    monkeypatch.setitem(sys.modules, "llama_cpp", found)
    monkeypatch.setattr(llama_cpp, "_weights", lambda: None)
    return found


@pytest.mark.parametrize("context", [100, llama_cpp.READ, CONTEXT, 3 * llama_cpp.READ])
def test_llama_cpps_cache_holds_every_token_once(library: Library, context: int) -> None:
    settings = Settings(context, rounds=2, warm_up=1)
    peer = llama_cpp.LlamaCpp(network(), "q8_0", True, settings)
    assert library.cells.of(0) == list(range(context))
    assert all(owners == {0} for owners, _ in library.cells.held)
    for _ in range(settings.steps):
        peer.step()
    assert len(library.cells.held) == context + settings.steps <= library.asked.n_ctx
    assert library.most <= library.asked.n_ctx
    assert library.asked.n_threads == torch.get_num_threads()
    assert library.asked.type_k == library.asked.type_v == library.GGML_TYPE_Q8_0


def test_a_context_that_is_not_used_is_freed(library: Library) -> None:
    peer = llama_cpp.LlamaCpp(network(), "f16", True, Settings(CONTEXT))
    assert library.cells.held
    del peer
    gc.collect()
    assert not library.cells.held


@pytest.mark.parametrize(("form", "bits"), [("f16", 16), ("q8_0", 8.5), ("q4_0", 4.5)])
@pytest.mark.usefixtures("library")
def test_bytes_of_llama_cpps_caches(form: str, bits: float) -> None:
    model = network()
    peer = llama_cpp.LlamaCpp(model, form, True, Settings(CONTEXT))
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * 32 * CONTEXT
    assert peer.cache_bytes == numbers * bits / 8


def test_a_context_that_cannot_be_had_is_one_clear_error(library: Library) -> None:
    library.llama_init_from_model = lambda weights, asked: None
    with pytest.raises(RuntimeError, match=r"llama\.cpp-f16: llama\.cpp makes no such context"):
        llama_cpp.LlamaCpp(network(), "f16", True, Settings(CONTEXT))


class Engine:
    """A stand-in for OpenVINO GenAI's pipeline: reads so many tokens a step, and answers so many."""

    def __init__(self, path: str, scheduler: Any, device: str, options: dict[str, Any]) -> None:
        self.scheduler, self.options = scheduler, options
        self.left = self.answered = 0

    def add_request(self, number: int, prompt: torch.Tensor, answer: Any) -> Any:
        self.left, self.most = prompt.shape[1], answer.max_new_tokens
        return SimpleNamespace(can_read=lambda: self.answered > 0)

    def step(self) -> None:
        self.left -= self.scheduler.max_num_batched_tokens
        self.answered += self.left <= 0

    def has_non_finished_requests(self) -> bool:
        return self.answered < self.most


@pytest.fixture
def genai(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        __version__="1.2-3",
        SchedulerConfig=SimpleNamespace,
        SparseAttentionConfig=SimpleNamespace,
        SparseAttentionMode=SimpleNamespace(TRISHAPE=0),
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=Engine,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", found)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    monkeypatch.setattr(openvino, "packaged_gguf", lambda: "a file")


@pytest.mark.usefixtures("genai")
def test_openvino_decodes_one_token_a_step_until_its_request_ends() -> None:
    settings = Settings(CONTEXT, rounds=2, warm_up=1)
    peer = openvino.OpenVino(network(), "u8", settings)
    engine: Any = peer._engine
    assert engine.answered == 1  # the prompt is read
    assert engine.options["KV_CACHE_PRECISION"] == "u8"
    assert engine.options["INFERENCE_NUM_THREADS"] == torch.get_num_threads()
    assert engine.scheduler.num_kv_blocks * openvino.BLOCK >= CONTEXT + settings.steps
    for _ in range(settings.steps):
        peer.step()
    assert engine.answered == settings.steps + 1
    peer.step()
    with pytest.raises(RuntimeError, match="openvino-u8: OpenVINO has ended the request"):
        peer.step()


@pytest.mark.usefixtures("genai")
def test_bytes_of_openvinos_caches() -> None:
    model = network()
    rows = CONTEXT * model.config.num_hidden_layers * model.config.num_key_value_heads
    found = {p: openvino.OpenVino(model, p, Settings(CONTEXT)).cache_bytes for p in openvino.BITS}
    # Of a token and head of 32: values with 8 bytes of range, keys with a 32nd of that for each channel.
    assert found == {
        "f16": rows * 2 * 64,
        "u8": rows * (32 + 8 + 32 + 8),
        "u4": rows * (16 + 8 + 16 + 8),
    }


class Session:
    """A stand-in for a session of ONNX Runtime, whose values are arrays. It checks what it is bound to."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.shown: list[int] = []

    def io_binding(self) -> "Session":
        return self

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.held[name] = value

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.written[name] = value

    def bind_output(self, name: str) -> None:
        assert name == "logits"

    def run_with_iobinding(self, binding: "Session") -> None:
        assert self.held["input_ids"].shape == (1, 1)
        self.shown.append(self.held["attention_mask"].shape[1])
        assert self.shown[-1] <= self.held["past_key_values.0.key"].shape[2]


def test_onnxruntime_writes_one_cache_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = Session(), network()
    value = SimpleNamespace(ortvalue_from_numpy=lambda array: array)
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="1.2", OrtValue=value))
    monkeypatch.setattr(onnx_runtime, "_session", lambda threads: session)
    settings = Settings(CONTEXT, rounds=2, warm_up=1)
    peer = onnx_runtime.OnnxRuntime(model, settings)
    for _ in range(settings.steps):
        peer.step()
    assert session.shown == [CONTEXT + 1 + i for i in range(settings.steps)]
    config = model.config
    for layer in range(config.num_hidden_layers):
        for states in ("key", "value"):
            held = session.held[f"past_key_values.{layer}.{states}"]
            assert session.written[f"present.{layer}.{states}"] is held
    assert peer.cache_bytes == 2 * config.num_hidden_layers * config.num_key_value_heads * 32 * 4 * CONTEXT


def test_a_builder_that_fails_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = SimpleNamespace(config=SimpleNamespace(), save_pretrained=lambda folder: None)
    monkeypatch.setattr(onnx_runtime, "load_model", lambda name: (saved, saved))
    with pytest.raises(RuntimeError, match=r"onnxruntime-genai's builder failed: .*onnxruntime_genai"):
        onnx_runtime._build(tmp_path, tmp_path)


def test_what_other_packages_run_is_timed_in_whole_steps_alone() -> None:
    peer = Sleeper("one", "setting", 0)
    assert not peer.alone
    with pytest.raises(NotImplementedError, match="one attends in whole steps alone"):
        peer.attend()

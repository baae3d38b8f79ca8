"""The benchmark's rows, on a model small enough to be timed in a moment. Nothing asserts a time."""

import gc
import time
from collections import Counter
from typing import Any
from weakref import WeakSet

import pytest
import torch
from transformers import DynamicCache

from support.attention_cases import exact, needs_flash
from support.models import tiny
from xquant import KVCache, parse_method
from xquant.methods.transform import Transform
from xquant_lab.bench import capacity, clocks, flash, trials
from xquant_lab.bench import run as evaluation
from xquant_lab.bench.ceilings import Ceilings, copy_bandwidth, matrix_rate, read_bandwidth
from xquant_lab.bench.clocks import HostClock
from xquant_lab.bench.contenders import Compressed, Full, Models, fill, random_cache
from xquant_lab.bench.parts import with_dense
from xquant_lab.bench.roofline import attention_step
from xquant_lab.bench.run import bench
from xquant_lab.bench.shaped import fitting_layers, random_calibration, shaped_model
from xquant_lab.bench.trials import Settings

CONTRACT = {
    *("method", "context", "batch", "ms_per_token", "attention_ms_per_layer", "cache_bytes"),
    *("speedup_vs_full", "gbytes_per_second"),
}


BF16 = (torch.bfloat16,)


def rows(specs: list[str], **options: Any) -> list[dict[str, Any]]:
    methods = [parse_method(spec) for spec in specs]
    settings = Settings(context=70, rounds=2, warm_up=1, **options)
    return bench(Models(tiny("llama", head_dim=32)), methods, settings, lambda *_: None)


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


def test_rows_come_after_every_round() -> None:
    seen: list[list[dict[str, Any]]] = []
    settings = Settings(context=70, rounds=3, warm_up=1, dtypes=BF16)
    methods = [parse_method("kivi-4bit:group=32")]
    models = Models(tiny("llama", head_dim=32))
    found = bench(models, methods, settings, lambda *_: None, see=seen.append)
    assert [[row["rounds"] for row in rows] for rows in seen] == [[1, 1], [2, 2], [3, 3]]
    assert {row["rounds_asked"] for rows in seen for row in rows} == {3}
    for number, rows in enumerate(seen):
        assert [row["method"] for row in rows] == ["full", "kivi-4bit:group=32"]
        for row in rows:
            assert row["ms_per_token"] > 0 and row["speedup_vs_full"] > 0
            assert (row["ms_min_max"][0] == row["ms_min_max"][1]) == (number == 0)
    assert [row["ms_per_token"] for row in seen[-1]] == [row["ms_per_token"] for row in found]


@pytest.mark.long
def test_what_is_filled_and_what_is_timed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options: run(function, backend="eager"))
    torch._dynamo.reset()
    said: list[str] = []
    settings = Settings(context=70, rounds=1, warm_up=1, dtypes=BF16, static=True, compiled=True)
    methods = [parse_method("kivi-4bit:group=32")]
    bench(Models(tiny("llama", head_dim=32)), methods, settings, lambda *shown: said.append(shown[-1]))
    ours = "kivi-4bit:group=32"
    full = [f"full, bfloat16 {attention}" for attention in ("sdpa", "eager")]
    filled = [*full, f"{ours}, bfloat16", f"{ours}, static, bfloat16", *(f"{each} compiled" for each in full)]
    assert said[: len(filled)] == [f"filling {what}" for what in filled]
    turns = said[len(filled) :][: len(filled)]
    assert turns[:2] == full
    assert [what.split(", ")[0] for what in turns[2:4]] == [f"compiling {ours}", f"compiling {ours} static"]
    assert turns[4:] == [f"compiling {each} compiled" for each in full]


def test_the_full_caches_settings_share_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def watched(model: Any, *size: int) -> DynamicCache:
        made.append(random_cache(model, *size))
        return made[-1]

    monkeypatch.setattr(trials, "random_cache", watched)
    rows(["kivi-4bit:group=32"])
    assert [cache.layers[0].keys.dtype for cache in made] == [torch.float32, torch.bfloat16]
    assert {cache.get_seq_length() for cache in made} == {70}


def test_a_cache_that_others_share_holds_the_same_after_a_turn() -> None:
    model = tiny("llama", head_dim=32)
    shared = random_cache(model, 20, 2)
    states = [layer.keys for layer in shared.layers]
    full, other = (Full(model, "sdpa", 20, 2, shared) for _ in range(2))
    for contender in (full, other, full):
        with torch.inference_mode():
            contender.step()
            contender.step()
            assert shared.get_seq_length() == 22
        contender.rewind()
        assert shared.get_seq_length() == 20
        assert all(layer.keys is keys for layer, keys in zip(shared.layers, states, strict=True))


def test_a_cache_that_drops_tokens_is_timed_with_those_it_keeps() -> None:
    specs = ["pyramid:keep=0.25,tail=8,group=8", "kivi-4bit:group=32"]
    full, dropped, kivi = rows(specs, sealing=True, dtypes=(torch.float32,))
    assert 0 < dropped["cache_bytes"] < full["cache_bytes"] / 2
    assert dropped["ms_per_token"] > 0 and dropped["attention_ms_per_layer"] > 0
    assert "sealing" in kivi and "sealing" not in dropped


@pytest.mark.long
def test_packed_weights_and_compiled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.compile  # as graphs are: inductor takes minutes
    monkeypatch.setattr(torch, "compile", lambda function, options: run(function, backend="eager"))
    torch._dynamo.reset()
    full, ours = rows(["kivi-4bit:group=32"], packed=True, compiled=True, dtypes=(torch.float32,))
    assert ours["packed"] and ours["compiled"] and ours["failed"] is None
    attentions, more = ("sdpa", "eager"), ("", " packed", " compiled", " packed compiled")
    assert set(full["tried"]) == {f"float32 {a}{each}" for a in attentions for each in more}
    label = f"float32 {full['kernel']}" + " packed" * full["packed"] + " compiled" * full["compiled"]
    assert full["ms_per_token"] == full["tried"][label]


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


def test_a_shape_has_as_many_layers_as_leave_room_for_every_cache() -> None:
    methods = [parse_method("kivi-4bit")]
    size = 8192, 32

    def fitting(gigabytes: float) -> int:
        return fitting_layers("llama-3.1-8b", methods, torch.bfloat16, size, gigabytes * 1e9)

    full = 32 * 8192 * 2 * 1024 * 2 * 32 / 1e9
    assert fitting(1e6) == fitting(1.4 * full) == 32  # 4 bits and their ranges, and an eighth in reserve
    assert fitting(1.2 * full) == 16
    assert fitting(0.1 * full) == 2
    assert fitting(0) == 1


@pytest.mark.long
def test_settings_twice_as_slow_as_another_are_given_up_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: Counter[tuple[torch.dtype, str]] = Counter()
    alive: WeakSet[Full] = WeakSet()
    left: set[tuple[torch.dtype, str]] = set()

    def step(contender: Full) -> None:
        setting = contender.dtype, contender.setting
        turns[setting] += 1
        alive.add(contender)
        if turns[setting] == 6:
            gc.collect()
            left.update({(each.dtype, each.setting) for each in alive})
        time.sleep(0.02 if setting == (torch.float32, "sdpa") else 0.2)

    monkeypatch.setattr(Full, "step", step)
    full = rows([])[0]
    assert (full["dtype"], full["kernel"]) == ("float32", "sdpa")
    assert len(full["tried"]) == 4
    assert turns.pop((torch.float32, "sdpa")) == 6  # three rounds, twice each
    assert set(turns.values()) == {2}
    assert left == {(torch.float32, "sdpa")}  # the others were freed


def test_what_the_machine_can_do_is_measured() -> None:
    cpu = torch.device("cpu")
    assert read_bandwidth() > 1e8
    assert copy_bandwidth(cpu, 1 << 20) > 1e7
    assert matrix_rate(cpu, 64) > 1e5


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU decides is decided here too; jobs are timed by the host."""
    monkeypatch.setattr(trials, "on_cpu", trials.on_gpu)
    monkeypatch.setattr(evaluation, "measure_on_cpu", evaluation.measure_on_gpu)
    monkeypatch.setattr(evaluation, "GraphClock", HostClock)
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 10**9)


LIMITS = Ceilings(copy=2e9, multiply=1e9)


def on_gpu(specs: list[str], model: Any = None, **options: Any) -> list[dict[str, Any]]:
    methods = [parse_method(spec) for spec in specs]
    settings = Settings(64, rounds=2, warm_up=1, **{"dtypes": BF16, "whole": False, **options})
    models = Models(model or tiny("llama", head_dim=32))
    return bench(models, methods, settings, lambda *_: None, limits=LIMITS)


@pytest.mark.long
@needs_flash
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("whole", [True, False])
def test_the_full_cache_is_attended_to_by_the_best_kernel_there_is(whole: bool) -> None:
    full, ours = on_gpu(["kivi-4bit:group=32"], whole=whole, batch=2)
    assert {"bfloat16 sdpa flash"} <= set(full["tried"])
    if not whole:
        assert {"bfloat16 sdpa flash packed", "bfloat16 torch grouped"} < set(full["tried"])
        missing = full["refused"]["bfloat16 flash-attn 2"]
        assert missing == "ModuleNotFoundError: No module named 'flash_attn'"
    assert "bfloat16 sdpa cudnn" in full["refused"]  # which a CPU has not
    assert full["ms_per_token"] == min(full["tried"].values())
    for row in (full, ours):
        assert set(row) >= CONTRACT and row["failed"] is None
        share = row["gbytes_per_second"] / 2
        assert row["share_of_copy_bandwidth"] == pytest.approx(share)
        assert row["timed_by"]["attend"]


@pytest.mark.long
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_roofline_stands_beside_what_was_measured() -> None:
    full, ours = on_gpu(["xquant-4bit:group=32"], dtypes=(torch.float32,))
    nbytes = 2 * 64 * 2 * 32 * 4  # of a layer
    assert full["cache_bytes"] == 5 * nbytes
    for row in (full, ours):
        assert row["roofline"]["full_ms_per_layer"] == pytest.approx(nbytes / 2e9 * 1e3)
    method = parse_method("xquant-4bit:group=32")
    layout = capacity.layout(tiny("llama", head_dim=32).config, method, torch.float32)
    least = attention_step(layout, 64, 1)
    assert least is not None and ours["roofline"]["flops"] == least.flops
    assert ours["roofline"]["ms_per_layer"] == pytest.approx(least.seconds(2e9, 1e9) / 5 * 1e3)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_does_not_fit_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 5 * 2 * 64 * 2 * 32 * 2
    monkeypatch.setattr(capacity, "free_bytes", lambda device: nbytes)
    full, ours = on_gpu(["kivi-4bit:group=32"])
    assert full["failed"].startswith("does not fit: ") and full["ms_per_token"] is None
    assert ours["failed"] is None and ours["ms_per_token"] > 0
    assert ours["speedup_vs_full"] is None  # over nothing


@pytest.mark.long
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("round", [1, 0])
def test_a_kernel_that_fails_has_a_row_that_says_why(round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Counter[str]()

    def attend(contender: Compressed) -> None:
        turns[contender.name] += 1
        if contender.name == "kivi-2bit:group=32" and turns[contender.name] > 2 * round:
            raise torch.OutOfMemoryError("out of memory\nat great length")

    monkeypatch.setattr(Compressed, "attend", attend)
    _, failed, other = on_gpu(["kivi-2bit:group=32", "kivi-4bit:group=32"])
    assert failed["failed"] == "OutOfMemoryError: out of memory"
    assert failed["attention_ms_per_layer"] is None and failed["cache_bytes"] is None
    assert other["failed"] is None and turns["kivi-4bit:group=32"] == 6


def test_states_that_have_room_are_not_copied_as_they_grow() -> None:
    model = tiny("llama", head_dim=32)
    roomy, plain = flash.filled(model, torch.float32, 20, 2, room=4), DynamicCache()
    for i, layer in enumerate(roomy.layers):
        plain.update(layer.keys.clone(), layer.values.clone(), i)
    where = roomy.layers[0].keys.data_ptr()
    for token in (5, 6, 7):
        ids = torch.full((2, 1), token)
        with torch.inference_mode():
            ours, theirs = (model(ids, past_key_values=c).logits for c in (roomy, plain))
        torch.testing.assert_close(ours, theirs)
    assert roomy.get_seq_length() == 23 and roomy.layers[0].keys.data_ptr() == where


@needs_flash
@pytest.mark.parametrize("kernel", ["sdpa flash", "sdpa flash packed", "torch grouped"])
def test_kernels_of_the_full_cache_attend(kernel: str) -> None:
    query, states = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 2, 40, 32)
    with torch.inference_mode():
        found = flash.KERNELS[kernel](query, states[0])(query, *states)
    expected = exact(query, *states, None, None).transpose(1, 2).float()
    torch.testing.assert_close(found.view_as(query), expected)


def test_a_graph_that_cannot_be_captured_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(job: Any, device: torch.device) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    restored = []
    monkeypatch.setattr(clocks, "capture", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", restored.append)
    clock = clocks.GraphClock(lambda: None, torch.device("cpu"))
    clock.settle()
    assert "launched by Python: RuntimeError: called a synchronizing" in clock.how
    assert restored == ["before"]


def test_appending_is_timed_apart_from_sealing() -> None:
    row = rows(["kivi-4bit:group=32"], whole=False, sealing=True)[-1]
    found = row["sealing"]
    assert found["block"] == 32
    assert found["seal_ms_per_block"] > 0 and found["append_ms_per_token"] > 0
    assert 0 < found["share_of_attention_and_storing"] < 1


def test_parts_are_packing_codes_and_outliers() -> None:
    spec = "kvquant-4bit-1%:datatype=nf,scales=online,group=32"
    methods = with_dense([parse_method(spec), parse_method("kivi-4bit:group=32")])
    assert [method.head for method in methods] == ["kvquant-4bit-1%", "kvquant-4bit", "kivi-4bit"]
    specs = [method.spec for method in methods]
    found = {row["method"]: row for row in rows(specs, whole=False, parts=True)}
    assert "parts" not in found["full"]
    sparse, dense, plain = (found[spec]["parts"] for spec in specs)
    taken, codes = (1e3 * found[spec]["attention_ms_per_layer"] for spec in specs[:2])
    assert all(each["packing_us"] > 0 for each in (sparse, dense, plain))
    assert sparse["dense_us"] == dense["dense_us"] == codes
    assert sparse["sparse_us"] == pytest.approx(taken - codes)
    assert dense["sparse_us"] == plain["sparse_us"] == 0


def test_static_caches_have_rows_of_their_own() -> None:
    full, growing, static = rows(["kivi-4bit:group=32"], static=True, dtypes=BF16)
    assert static["method"] == "kivi-4bit:group=32 static" and static["failed"] is None
    assert static["ms_per_token"] > 0 and static["attention_ms_per_layer"] > 0
    # Memory for all tokens that may come, and recent ones as they are.
    assert growing["cache_bytes"] < static["cache_bytes"]
    assert full["cache_bytes"] > 0

"""PagedPast, without an engine: steps of many sequences against attention over each by itself."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_cases import TOLERANCES, laid
from support.examples import examples
from support.host_waits import Launches, Silent
from support.models import tiny
from support.paged_sequences import (
    BLOCK,
    KEPT,
    KERNEL_SPECS,
    PLAIN,
    SPECS,
    STEPS,
    Engine,
    codec_of,
    scoring_of,
    step_of,
)
from xquant import parse_method
from xquant.kernels import cpu, triton
from xquant.kernels.backend import Backend
from xquant.kernels.call import AttentionCall
from xquant.past.slots import Slots
from xquant.past.step import NewTokens, Retention

needs_native = pytest.mark.skipif(not cpu.library.isas(), reason="no native kernels here")
NATIVE = [cpu.BACKENDS[isa] for isa in cpu.library.isas()]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def wide() -> Any:
    """With heads that the native kernels read."""
    return tiny("llama", head_dim=32, hidden_size=64)


def _kept(specs: list[str]) -> Any:
    """Every method in every way to keep tokens. Trellis codes take long to seal: `make matrix` has all."""
    return pytest.mark.parametrize(
        ("spec", "retention"),
        [
            pytest.param(spec, retention, marks=pytest.mark.long if slow else ())
            for spec in specs
            for retention in KEPT
            for slow in [spec.startswith("tc-") and retention not in (PLAIN, KEPT[-1])]
        ],
    )


@_kept(SPECS)
def test_each_sequence_reads_its_own_past(model: Any, spec: str, retention: Retention) -> None:
    torch.manual_seed(2)
    engine = Engine(codec_of(model, spec), retention=retention)
    for step in STEPS:
        assert engine.step(step) < 2e-5


@pytest.mark.parametrize("backend", NATIVE)
@_kept(KERNEL_SPECS)
def test_kernels_read_unequal_sequences(wide: Any, spec: str, retention: Retention, backend: Backend) -> None:
    torch.manual_seed(2)
    codec = codec_of(wide, spec)
    fixed = retention is not PLAIN
    engine = Engine(codec, scoring_of(codec, 4.0), retention=retention, backend=backend, fixed=fixed)
    assert engine.layer.in_place
    # Latents of random states differ more in size than those that a model makes.
    tolerance = 5e-3 if spec.startswith("xquant") else 5e-2 if spec.startswith("tc-") else 1e-3
    few = {0: 3, 1: 2, 2: 1, 3: 2}  # several new tokens, as many or not
    for step in [*STEPS[:20], few, {0: 5, 2: 5, 3: 5}, few]:
        assert engine.step(step) < tolerance


@pytest.mark.long
@pytest.mark.parametrize("retention", KEPT[3:4])
@pytest.mark.parametrize("spec", KERNEL_SPECS[:6:2])
def test_triton_reads_unequal_sequences(wide: Any, spec: str, retention: Retention) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton", minversion="3.5")
    from support import triton_interpreter

    triton_interpreter.mend()
    torch.manual_seed(2)
    codec = codec_of(wide, spec)
    engine = Engine(codec, scoring_of(codec, 4.0), retention=retention, backend=triton.BACKEND)
    assert engine.layer.in_place
    for step in [*STEPS[:3], {0: 3, 1: 2, 2: 1}, *STEPS[3:7]]:
        assert engine.step(step) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "kivi-4bit:group=32,sink=3"])
def test_every_step_of_an_engine_launches_the_same(
    wide: Any, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a CUDA graph of one step holds for all; and a step that completes no block asks nothing of the
    device."""
    pytest.importorskip("triton", minversion="3.5")
    from support import triton_interpreter
    from xquant.kernels.triton import attention

    triton_interpreter.mend()
    torch.manual_seed(2)
    sink = parse_method(spec).sink
    retention = Retention(BLOCK, BLOCK, slots=Slots(sink) if sink else None)
    engine = Engine(codec_of(wide, spec), retention=retention, backend=triton.BACKEND, fixed=True)
    engine.step({0: 29, 1: 45, 2: 3})
    noted: list[Any] = []
    for name in ("attend", "combine", "append"):
        monkeypatch.setattr(attention, name, Launches(getattr(attention, name), noted))
    attend, silent = engine.layer.attend, 0

    def asked(call: AttentionCall, step: Any, out: Tensor) -> None:
        nonlocal silent
        if step.filled is None:
            silent += 1
            with Silent():
                attend(call, step, out)
        else:
            attend(call, step, out)

    monkeypatch.setattr(engine.layer, "attend", asked)
    first: list[Any] = []
    for _ in range(6):  # sequence 0 completes its first block on the way
        noted.clear()
        assert engine.step({0: 1, 1: 1, 2: 1}) < 1e-3
        first = first or list(noted)
        assert noted == first and len(noted) == 3
    assert silent == 5


@pytest.mark.parametrize("backend", [None, *NATIVE[:1]])
def test_drafts_that_are_refused_leave_nothing_behind(wide: Any, backend: Backend | None) -> None:
    """Blocks that they completed are sealed anew, and what they overwrote in the ring was no longer read."""
    torch.manual_seed(5)
    drafts = 3
    retention = Retention(BLOCK, capacity=BLOCK + drafts)
    engine = Engine(codec_of(wide, "kivi-4bit:group=32"), backend=backend, retention=retention)
    tolerance = 2e-5 if backend is None else 1e-3
    assert engine.step({0: 20, 1: 45}) < tolerance
    for step in range(40):
        assert engine.step({0: 1 + drafts, 1: 1 + drafts}) < tolerance
        for number in (0, 1):
            if refused := (step + number) % (drafts + 1):
                engine.refuse(number, refused)


def test_pages_of_a_common_past_are_shared(model: Any) -> None:
    """A block that one sequence seals is read by another in the same step."""
    torch.manual_seed(3)
    engine = Engine(codec_of(model, "kivi-4bit:group=32"))
    engine.step({0: 20})
    engine.tables[1] = engine.tables[0][:]
    begun = torch.cat(engine.past[0])
    codec, view = engine.codec, engine.codec.view
    # Sequence 1 goes on behind the block that sequence 0 completes.
    key, value = torch.randn(2, 12 + 3, view.kv_heads, view.head_size)
    query = torch.randn(15, view.query_heads, view.head_size)
    rows = torch.cat([key.flatten(1), value.flatten(1)], -1)
    engine.past[0].append(rows[:12])
    engine.past[1] = [torch.cat([begun, rows[:12]]), rows[12:]]
    tables = torch.tensor([engine.tables[0], engine.tables[0]])
    tables = torch.cat([tables, torch.tensor([[0], [engine.free.pop()]])], 1)
    out = torch.empty_like(query)
    new_tokens = [NewTokens(0, 12, 20), NewTokens(12, 15, 32)]
    for order in ([0, 1], [1, 0]):  # whichever comes first
        step = step_of([new_tokens[i] for i in order], order, tables[order], PLAIN)
        engine.layer.attend(AttentionCall(query, key, value, None, 0.3, None), step, out)
        assert (out[12:] - engine.expected(1, query[12:])).abs().max() < 2e-5
        assert torch.equal(engine.rings[1, :3], rows[12:])
    assert codec.view.kv_width * 2 == engine.layer.row


@pytest.mark.parametrize("backend", [None, *NATIVE[:1]])
def test_sinks_are_shared_with_their_page(wide: Any, backend: Backend | None) -> None:
    """Of a prefix that another sequence computed, and that keeps its sinks while memory for more is made."""
    torch.manual_seed(6)
    retention = Retention(BLOCK, BLOCK, slots=Slots(2))
    engine = Engine(codec_of(wide, "kivi-2bit:group=32"), backend=backend, retention=retention)
    tolerance = 2e-5 if backend is None else 1e-3
    engine.step({0: 40})
    begun = torch.cat(engine.past[0])[:BLOCK]
    for number in range(1, 161, 8):  # all with ring 1
        engine.step({number: 33})
        engine.free += [engine.tables[number].pop()]  # the second page; the first stays in use
    engine.tables[30], engine.past[30] = engine.tables[0][:1], [begun]
    assert engine.step({30: 3, 0: 1}) < tolerance
    assert engine.step({30: 1, 0: 1}) < tolerance
    assert engine.step({30: 40, 0: 1}) < tolerance


def test_a_prompt_is_read_by_one_function_from_the_store() -> None:
    """However many of its tokens are left; the tokens that follow it are read by the kernel."""
    new_tokens = [
        NewTokens(0, 1, 64),
        NewTokens(1, 2, 65),
        NewTokens(2, 42, 0),
    ]
    tables = torch.arange(9).view(3, 3)
    for store, wanted in ((True, [0, 2]), (False, [2])):
        step = step_of(new_tokens, [0, 1, 2], tables, Retention(BLOCK, BLOCK, 0, store), [65, 65, 40])
        _, chunks = step.readers(native=True)
        assert [new_tokens.index(chunk.new) for chunk in chunks.each] == wanted


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_scores_are_capped_and_sinks_learned(model: Any, softcap: float) -> None:
    torch.manual_seed(4)
    codec = codec_of(model, "full:group=32")
    engine = Engine(codec, scoring_of(codec, softcap))
    for tokens in (40, 1, 30):
        assert engine.step({0: tokens}) < 2e-5


def test_a_page_is_a_block(model: Any) -> None:
    layer = Engine(codec_of(model, "kivi-4bit:group=32")).layer
    width, tokens = layer.codec.view.kv_width, 32
    formula = tokens * 2 * width * 4 / 8 + 4 * width + 4 * tokens * math.ceil(width / 32)
    assert layer.layout.packed_nbytes == formula


@needs_native
@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_mixed_states_are_read_right_from_pages(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(["kivi-8bit:group=32", "xquant-8bit:group=32"]))
    backend, dtypes = data.draw(st.sampled_from(NATIVE)), st.sampled_from(list(TOLERANCES))
    query_dtype, key_dtype, value_dtype = (data.draw(dtypes) for _ in range(3))
    chosen = [data.draw(st.sampled_from(["whole", "offset", "wide"])) for _ in range(3)]
    engine = Engine(codec_of(tiny("llama", head_dim=32, hidden_size=64), spec), backend=backend)
    usual = engine.layer.attend

    def attend(call: AttentionCall, step: Any, out: Tensor) -> None:
        query, key, value, *scoring = call
        for rows in (query, key, value, *(past[-1] for past in engine.past.values())):
            rows.copy_(rows.bfloat16())  # numbers that all types hold
        given = (query.to(query_dtype), key.to(key_dtype), value.to(value_dtype))
        states = [laid(x, layout) for x, layout in zip(given, chosen, strict=True)]
        found = torch.empty_like(query, dtype=query_dtype)
        usual(AttentionCall(*states, *scoring), step, found)
        out.copy_(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.layer, "attend", attend)
        for new in ({0: 70, 1: 5}, {0: 1, 1: 1}, {0: 2, 1: 2}):
            assert engine.step(new) < max(TOLERANCES[query_dtype], 5e-3)


def changed(usual: Any, change: Any, *given: Any) -> None:
    usual(*given[:-1], change(given[-1]))


@needs_native
def test_an_output_of_another_type_or_size_is_refused(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(codec_of(wide, "kivi-8bit:group=32"), backend=NATIVE[0])
    engine.step({0: 40})
    usual, wrong = engine.layer.attend, [torch.Tensor.double, lambda out: out[:, :2]]
    for change in wrong:
        monkeypatch.setattr(engine.layer, "attend", partial(changed, usual, change))
        with pytest.raises(ValueError, match=r"a kernel wants torch\.float32 .*, not"):
            engine.step({0: 1})

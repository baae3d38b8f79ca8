"""Triton's kernels over an engine's pages, in Triton's interpreter, against exact attention over what the
pages decode to, and against the same kernels over a cache."""

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support import triton_interpreter
from support.attention_cases import DEVICE, TOLERANCE, Case, filled
from support.engine_memory import (
    BLOCK,
    POSITIONS,
    Asked,
    Memory,
    One,
    angles_of,
    asked,
    check_own_reads,
    codec_of,
    new_states,
)
from support.host_waits import Silent, Unlaunched
from xquant.kernels.call import AttentionCall
from xquant.kernels.choose import choose
from xquant.kernels.torch import FOLDED, REFERENCE
from xquant.kernels.triton import BACKEND, attention
from xquant.kernels.triton.device import Slots
from xquant.past.angles import Angles
from xquant.past.pages import PageLayout
from xquant.past.sequences import Sequences
from xquant_lab.bench.clocks import capture

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()

SPECS = [
    "kivi-4bit:group=32",
    "kivi-3bit:group=32,rope=post",
    "asymkv-1.5bit:group=32",
    "int4-gs32:group=32,rope=pre",
    "nf4:group=32",
    "kvquant-3bit-5%:group=32,datatype=nf,scales=online",
    "kvquant-3bit:group=32,scales=offline",
]


@settings(deadline=None, max_examples=8, phases=(Phase.explicit, Phase.generate))  # it is slow
@given(
    spec=st.sampled_from(SPECS),
    heads=st.sampled_from([(32, 2, 2), (64, 1, 3), (96, 1, 1)]),
    what=asked,
)
def test_any_sequences_read_their_own(spec: str, heads: tuple[int, int, int], what: Asked) -> None:
    check_own_reads(BACKEND, codec_of(spec, *heads), what)


@pytest.mark.parametrize("slots", [1, 100])
def test_splits_are_of_the_blocks_that_are_there(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the engine allows sequences to be."""
    monkeypatch.setattr(Slots, "of", lambda *args, **constants: slots)
    torch.manual_seed(3)
    codec = codec_of("kivi-4bit:group=32", 32, 2, 2)
    memory = Memory(BACKEND, codec, 40, 0)
    ones = [One(limit, 3, 0, 0) for limit in (0, 5 * BLOCK, BLOCK, 2 * BLOCK)]
    of = memory.sequences(ones, 1, columns=30)
    states = new_states(codec.view, 1 + 2 * len(ones))
    wanted = [memory.expected(b, one, states, of, 0.0) for b, one in enumerate(ones)]
    out = torch.empty_like(states[0])
    memory.reader().attend(memory.call(states), of, out)
    for b, want in enumerate(wanted):
        assert (out[int(of.first[b])].double() - want[0]).norm() < TOLERANCE * want.norm()


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "kivi-2bit:group=32,rope=post", "int4:group=32"])
def test_a_cache_is_the_case_of_equal_lengths(spec: str) -> None:
    """Of the same blocks, the kernels of the library and of an engine make the same."""
    one = Case(spec, path="triton", batch=2, tokens=3 * BLOCK + 5, layers=1)
    cache = filled(one)
    layer, view = cache.compressed[0], cache.compressed[0].codec.view
    cache.finish()
    cos, sin = cache.index.rope_at(torch.arange(POSITIONS, device=DEVICE)[None])
    angles = Angles(*(t[0, :, : view.head_size // 2] for t in (cos, sin)))
    query, key, value = new_states(view, 2)
    newest = (t.unflatten(0, (2, 1)).transpose(1, 2) for t in (query, key, value))
    wanted = cache.attend(view.index, AttentionCall(*newest, None, 0.2, None))
    assert wanted is not None and layer.stream.table is not None

    layout = PageLayout(layer.codec.segments, BLOCK)
    pool = torch.zeros(layer.stream.blocks, layout.nbytes, dtype=torch.uint8, device=DEVICE)
    for fields, slabs in zip(layout.fields(pool), layer.stream.pool, strict=True):
        for name, field in fields.items():
            field.copy_(slabs[name].whole())
    reader = BACKEND.paged(layer.codec, layout, angles.paged(BLOCK))
    assert reader is not None
    tail = (
        layer.states()[0].transpose(1, 2).flatten(2),
        layer.states()[1].transpose(1, 2).flatten(2),
    )
    past = one.tokens - 1  # the cache has the newest already
    limit = layer.stream.tokens
    held = past - limit
    rings = torch.zeros(2, BLOCK, 2 * view.kv_width, device=DEVICE)
    rings[:, :held] = torch.cat([t[:, limit:past] for t in tail], -1)
    reader.bind(pool, rings, rings[:, :0])
    int32 = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    of = Sequences(
        queries=1,
        block=BLOCK,
        first=int32([0, 1]),
        table=layer.stream.table.int(),
        limits=int32([limit, limit]),
        held=int32([[0, 0, held, limit], [1, 0, held, limit]]),
        new=int32([[0, 0, 1, past], [1, 0, 1, past]]),
        sinks=None,
        sink=0,
    )
    out = torch.empty_like(query)
    reader.attend(AttentionCall(query, key, value, None, 0.2, None), of, out)
    assert held > 0
    assert (out - wanted.flatten(0, 1)).norm() < 1e-5 * out.norm()


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[-1]])
def test_the_device_is_asked_for_nothing(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a CUDA graph can capture it; nor does what is launched depend on what the memory says."""
    grids: list[Any] = []
    for kernel, out in (("attend", "sums_out"), ("combine", "out"), ("append", "rings")):
        silent = Unlaunched(getattr(attention, kernel), out, grids)
        monkeypatch.setattr(attention, kernel, silent)
    codec = codec_of(spec, 32, 2, 2)
    memory = Memory(BACKEND, codec, 40, 2)
    states = new_states(codec.view, 9)
    out = torch.empty_like(states[0])
    reader = memory.reader()
    steps = [[One(0, 0, 0, 0), One(0, 1, 0, 0)], [One(5 * BLOCK, 31, 7, 2), One(BLOCK, 0, 0, 2)]]
    for ones in steps:
        of = memory.sequences(ones, 2, columns=20)
        with Silent():
            reader.attend(memory.call(states), of, out)
    assert grids[:3] == grids[3:] and len(grids) == 6
    with pytest.raises(AssertionError, match="waits for the device"), Silent():
        assert of.columns  # what kernels on a CPU are told would be seen


def test_a_graph_holds_for_other_steps() -> None:
    """The same call, after other numbers were written to the same memory; on a GPU, a CUDA graph of it."""
    torch.manual_seed(4)
    codec = codec_of(SPECS[0], 32, 2, 2)
    memory = Memory(BACKEND, codec, 40, 1)
    states = new_states(codec.view, 7)
    out = torch.empty_like(states[0])
    reader = memory.reader()
    of = memory.sequences([One(0, 0, 0, 0)] * 3, 1, columns=8)

    def attend() -> None:
        reader.attend(memory.call(states), of, out)

    again = capture(attend, DEVICE).replay if DEVICE.type == "cuda" else attend
    for ones in (
        [One(64, 5, 36, 1), One(0, 40 - 1, 3, 0), One(0, 0, 0, 0, idle=True)],
        [One(32, 0, 9, 1), One(250, 7, 0, 1), One(0, 0, 0, 0)],
    ):
        new = memory.sequences(ones, 1, columns=8)
        for name in ("first", "table", "limits", "held", "new", "sinks"):
            getattr(of, name).copy_(getattr(new, name))
        wanted = [memory.expected(b, one, states, of, 0.0) for b, one in enumerate(ones)]
        again()
        for b, (one, want) in enumerate(zip(ones, wanted, strict=True)):
            found = out[int(of.first[b])].double()
            assert (found - want[0] * (not one.idle)).norm() < TOLERANCE * want.norm()


def test_what_rebuilds_its_states_has_no_pages_here() -> None:
    codec = codec_of("xquant-4bit:group=32,form=gqa", 32, 2, 2)
    layout = PageLayout(codec.segments, BLOCK)
    assert BACKEND.paged(codec, layout, angles_of(32).paged(BLOCK)) is None


def test_layers_on_a_gpu_are_read_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(SPECS[0], 32, 2, 2)
    monkeypatch.setattr(type(codec.view), "device", torch.device("cuda"))
    monkeypatch.setattr(BACKEND, "missing", lambda codec: "", raising=False)
    assert choose(codec, BLOCK).backend is BACKEND
    monkeypatch.setattr(BACKEND, "missing", lambda codec: "no Triton")
    assert choose(codec, BLOCK).backend in (FOLDED, REFERENCE)

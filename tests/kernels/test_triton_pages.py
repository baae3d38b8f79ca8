"""Triton's kernels over an engine's pages, in Triton's interpreter, against exact attention over what the
pages decode to, and against the same kernels over a cache."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support import triton_interpreter
from support.attention_cases import DEVICE, TOLERANCE, Case, filled
from support.caches import calibration
from support.host_waits import Silent, Unlaunched
from support.models import tiny
from xquant import parse_method
from xquant.kernels.call import AttentionCall
from xquant.kernels.choose import choose
from xquant.kernels.paged import PagedAttention
from xquant.kernels.torch import FOLDED, REFERENCE
from xquant.kernels.triton import BACKEND, attention
from xquant.kernels.triton.device import Slots
from xquant.methods import LayerCodec
from xquant.models import view_model
from xquant.past.angles import Angles
from xquant.past.packer import TORCH
from xquant.past.pages import ALIGNMENT, PageLayout, Pages
from xquant.past.sequences import Sequences
from xquant.serve.build import codecs_of
from xquant_lab.bench.clocks import capture

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()

BLOCK, POSITIONS, PAGES, RINGS, SLOTS = 32, 256, 24, 5, 3
NAN = 255  # bytes of NaN in every float
SPECS = [
    "kivi-4bit:group=32",
    "kivi-3bit:group=32,rope=post",
    "asymkv-1.5bit:group=32",
    "int4-gs32:group=32,rope=pre",
    "nf4:group=32",
    "kvquant-3bit-5%:group=32,datatype=nf,scales=online",
    "kvquant-3bit:group=32,scales=offline",
]


@functools.cache
def codec_of(spec: str, size: int, kv_heads: int, group_heads: int) -> LayerCodec:
    heads = kv_heads * group_heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = tiny("llama", head_dim=size, hidden_size=8 * heads, **sizes).to(DEVICE)
    layers = view_model(model).compressed
    return codecs_of(parse_method(spec), layers, calibration(model, spec))[-1]


def angles_of(size: int) -> Angles:
    turns = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(size // 2) * 2 / size)
    return Angles(turns.cos().to(DEVICE), turns.sin().to(DEVICE))


@dataclass(frozen=True)
class One:
    """A sequence: the tokens that it reads from pages and from its ring, and where its ring begins."""

    limit: int
    held: int
    first: int
    sinks: int
    idle: bool = False
    """It fills up a batch, and has no tokens."""


class Memory:
    """Pages, rings and slots with random states, and sequences that have theirs there."""

    def __init__(self, codec: LayerCodec, capacity: int, sink: int, beside: int = 0) -> None:
        self.codec, self.capacity, self.sink, view = codec, capacity, sink, codec.view
        self.scaling = view.head_size**-0.5
        self.layout = PageLayout(codec.segments, BLOCK)
        self.angles = angles_of(view.head_size)
        stride = self.layout.nbytes + beside * ALIGNMENT
        self.pool = torch.full((PAGES, stride), NAN, dtype=torch.uint8, device=DEVICE)
        self.memory = self.pool[:, stride - self.layout.nbytes :]
        self.pages = Pages(self.layout, self.memory, TORCH)
        written = torch.arange(1, PAGES, device=DEVICE)  # page 0 is nobody's
        width = 2 * view.kv_width
        self.pages.write(written, torch.randn(PAGES - 1, BLOCK, width, device=DEVICE))
        self.rings = torch.randn(RINGS, capacity, width, device=DEVICE)
        self.slots = torch.randn(SLOTS, sink, width, device=DEVICE)

    def reader(self) -> PagedAttention:
        angles = self.angles.paged(BLOCK)
        found = BACKEND.paged(self.codec, self.layout, angles)
        assert found is not None
        found.bind(self.memory, self.rings, self.slots)
        return found

    def call(self, states: tuple[Tensor, Tensor, Tensor], softcap: float = 0.0) -> AttentionCall:
        return AttentionCall(*states, None, self.scaling, softcap)

    def sequences(self, ones: list[One], queries: int, columns: int) -> Sequences:
        count = len(ones)
        table = torch.zeros(count, columns, dtype=torch.int32)
        rings, starts = torch.randperm(RINGS), [1 + 2 * queries * b for b in range(count)]
        held, new, sinks = [], [], []
        for b, one in enumerate(ones):
            used = math.ceil(one.limit / BLOCK)
            table[b, :used] = torch.randint(1, PAGES, (used,))  # some pages are shared
            before = one.limit + one.held
            held.append([int(rings[b]), one.first, one.held, one.limit])
            new.append([starts[b], 0, 0 if one.idle else queries, before])
            sinks.append([b % SLOTS, 0, one.sinks, 0])
        int32 = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
        return Sequences(
            queries=queries,
            block=BLOCK,
            first=int32(starts),
            table=table.to(DEVICE),
            limits=int32([one.limit for one in ones]),
            held=int32(held),
            new=int32(new),
            sinks=int32(sinks) if self.sink else None,
            sink=self.sink,
        )

    def decoded(self, table: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[limit, G, D]`` of the pages in a row of the table."""
        view, numbers = self.codec.view, table[: math.ceil(limit / BLOCK)].long()
        rows = self.pages.read(numbers, torch.float32).flatten(0, 1)[None]
        states = self.codec.rebuild(self.codec.recall(rows, None, sealing=False))
        keys, values = (t[0].unflatten(-1, (view.kv_heads, -1)) for t in states)
        if not self.codec.rotated:
            keys = self.angles.apply_rope(keys, torch.arange(len(keys), device=DEVICE))
        return keys[:limit], values[:limit]

    def expected(
        self, b: int, one: One, given: tuple[Tensor, Tensor, Tensor], of: Sequences, softcap: float
    ) -> Tensor:
        """``[t, H, D]`` of the b-th sequence, in fp64."""
        view = self.codec.view
        own = slice(int(of.first[b]), int(of.first[b]) + of.queries)
        query, key, value = (t[own].double() for t in given)
        past = [torch.zeros(2, 0, view.kv_heads, view.head_size, device=DEVICE)]
        if one.limit:
            old = torch.stack(self.decoded(of.table[b], one.limit))
            old[:, : one.sinks] = self._states(self.slots[b % SLOTS, : one.sinks])
            past.append(old)
        places = (one.first + torch.arange(one.held, device=DEVICE)) % self.capacity
        past.append(self._states(self.rings[int(of.held[b, 0]), places]))
        keys, values = torch.cat([*past, torch.stack([key, value])], 1).repeat_interleave(
            view.query_heads // view.kv_heads, 2
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        later = torch.ones(scores.shape[1:], device=DEVICE).triu(len(keys) - len(query) + 1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def _states(self, rows: Tensor) -> Tensor:
        """Rows ``[t, W]`` as keys and values ``[2, t, G, D]``."""
        view = self.codec.view
        return rows.view(-1, 2, view.kv_heads, view.head_size).transpose(0, 1)


def new_states(view: Any, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, parts of one projection."""
    heads = view.query_heads, view.kv_heads, view.kv_heads
    fused = torch.randn(rows, sum(heads), view.head_size, device=DEVICE)
    query, key, value = fused.split(heads, 1)
    return query, key, value


sequences = st.builds(
    One,
    limit=st.integers(0, 3 * BLOCK),
    held=st.integers(0, 40),
    first=st.integers(0, 39),
    sinks=st.just(0),
)


@settings(deadline=None, max_examples=8, phases=(Phase.explicit, Phase.generate))  # it is slow
@given(
    spec=st.sampled_from(SPECS),
    heads=st.sampled_from([(32, 2, 2), (64, 1, 3), (96, 1, 1)]),
    ones=st.lists(sequences, min_size=1, max_size=3),
    sink=st.sampled_from([0, 1, 3]),
    queries=st.integers(1, 4),
    columns=st.integers(3, 40),
    beside=st.integers(0, 3),
    softcap=st.sampled_from([0.0, 4.0]),
    idle=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_sequences_read_their_own(
    spec: str,
    heads: tuple[int, int, int],
    ones: list[One],
    sink: int,
    queries: int,
    columns: int,
    beside: int,
    softcap: float,
    idle: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    codec = codec_of(spec, *heads)
    memory = Memory(codec, 40 + queries, sink, beside)
    ones = [One(o.limit, o.held, o.first, sink if o.limit >= BLOCK else 0) for o in ones]
    if idle:
        ones.append(One(0, 0, 0, 0, idle=True))
    of = memory.sequences(ones, queries, columns)
    states = new_states(codec.view, 1 + 2 * queries * len(ones))
    out = torch.full(states[0].shape, 7.0, device=DEVICE)
    rings = memory.rings.clone()
    wanted = [memory.expected(b, one, states, of, softcap) for b, one in enumerate(ones)]

    memory.reader().attend(memory.call(states, softcap), of, out)

    nobodys = torch.ones(len(out), dtype=torch.bool)
    for b, one in enumerate(ones):
        start = int(of.first[b])
        own, found = slice(start, start + queries), out[start : start + queries].double()
        nobodys[own] = False
        if one.idle:
            assert not found.any()
            continue
        assert (found - wanted[b]).norm() < TOLERANCE * wanted[b].norm()
        places = (one.first + one.held + torch.arange(queries)) % memory.capacity
        rows = torch.cat([t[own].flatten(1) for t in states[1:]], -1)
        rings[int(of.held[b, 0]), places.to(DEVICE)] = rows
    assert (out[nobodys.to(DEVICE)] == 7).all()
    assert torch.equal(memory.rings, rings)


@pytest.mark.parametrize("slots", [1, 100])
def test_splits_are_of_the_blocks_that_are_there(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the engine allows sequences to be."""
    monkeypatch.setattr(Slots, "of", lambda *args, **constants: slots)
    torch.manual_seed(3)
    codec = codec_of("kivi-4bit:group=32", 32, 2, 2)
    memory = Memory(codec, 40, 0)
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
    memory = Memory(codec, 40, 2)
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
    memory = Memory(codec, 40, 1)
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

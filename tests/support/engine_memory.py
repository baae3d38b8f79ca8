"""An engine's pages, rings and slots with random states, and exact attention over what they decode to."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.attention_cases import DEVICE, TOLERANCE
from support.caches import calibration
from support.models import tiny
from xquant import parse_method
from xquant.kernels.backend import Backend
from xquant.kernels.call import AttentionCall
from xquant.kernels.paged import PagedAttention
from xquant.methods import LayerCodec
from xquant.models import view_model
from xquant.past.angles import Angles
from xquant.past.packer import TORCH
from xquant.past.pages import ALIGNMENT, PageLayout, Pages
from xquant.past.sequences import Sequences
from xquant.serve.build import codecs_of

BLOCK, POSITIONS, PAGES, RINGS, SLOTS = 32, 256, 24, 5, 3
NAN = 255  # bytes of NaN in every float


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

    def __init__(
        self, backend: Backend, codec: LayerCodec, capacity: int, sink: int, beside: int = 0
    ) -> None:
        self.backend, self.codec, self.capacity, self.sink, view = backend, codec, capacity, sink, codec.view
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
        found = self.backend.paged(self.codec, self.layout, self.angles.paged(BLOCK))
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


@dataclass(frozen=True)
class Asked:
    """What is asked of an engine's memory: of which sequences, and how."""

    ones: list[One]
    sink: int
    queries: int
    columns: int
    beside: int
    softcap: float
    idle: bool
    seed: int


asked = st.builds(
    Asked,
    ones=st.lists(
        st.builds(
            One,
            limit=st.integers(0, 3 * BLOCK),
            held=st.integers(0, 40),
            first=st.integers(0, 39),
            sinks=st.just(0),
        ),
        min_size=1,
        max_size=3,
    ),
    sink=st.sampled_from([0, 1, 3]),
    queries=st.integers(1, 4),
    columns=st.integers(3, 40),
    beside=st.integers(0, 3),
    softcap=st.sampled_from([0.0, 4.0]),
    idle=st.booleans(),
    seed=st.integers(0, 2**31),
)


def check_own_reads(backend: Backend, codec: LayerCodec, what: Asked) -> None:
    """Each sequence attends to its own past, and what it holds is what it is given; others keep theirs."""
    torch.manual_seed(what.seed)
    queries, sink = what.queries, what.sink
    memory = Memory(backend, codec, 40 + queries, sink, what.beside)
    ones = [One(o.limit, o.held, o.first, sink if o.limit >= BLOCK else 0) for o in what.ones]
    if what.idle:
        ones.append(One(0, 0, 0, 0, idle=True))
    of = memory.sequences(ones, queries, what.columns)
    states = new_states(codec.view, 1 + 2 * queries * len(ones))
    out = torch.full(states[0].shape, 7.0, device=DEVICE)
    rings = memory.rings.clone()
    wanted = [memory.expected(b, one, states, of, what.softcap) for b, one in enumerate(ones)]

    memory.reader().attend(memory.call(states, what.softcap), of, out)

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

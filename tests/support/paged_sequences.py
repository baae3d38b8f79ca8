"""Sequences whose past an engine keeps in pages and rings, around one `PagedPast`: no engine is needed."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from support.caches import calibration
from xquant import parse_method
from xquant.kernels.backend import Backend
from xquant.kernels.call import AttentionCall
from xquant.kernels.torch import REFERENCE
from xquant.methods import LayerCodec
from xquant.models import view_model
from xquant.past.angles import Angles
from xquant.past.exact import Scoring
from xquant.past.packer import TORCH
from xquant.past.paged import PagedPast
from xquant.past.sealing import pack_rows
from xquant.past.sequences import FixedSequences
from xquant.past.slots import Slots
from xquant.past.step import NewTokens, Retention, Step, Whereabouts
from xquant.past.stream import Stream
from xquant.serve.build import codecs_of

BLOCK, POSITIONS = 32, 300
PLAIN = Retention(BLOCK, capacity=BLOCK)


def codec_of(model: Any, spec: str) -> LayerCodec:
    layers = view_model(model).compressed
    return codecs_of(parse_method(spec), layers, calibration(model, spec))[2]


def angles_of(size: int) -> Angles:
    turns = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(size // 2) * 2 / size)
    return Angles(turns.cos(), turns.sin())


PLAINLY = Scoring(0.3)


def scoring_of(codec: LayerCodec, softcap: float) -> Scoring:
    """With sink logits, too."""
    return Scoring(0.3, softcap, torch.randn(codec.view.query_heads))


def step_of(
    new_tokens: list[NewTokens],
    rings: list[int],
    tables: Tensor,
    retention: Retention,
    until: list[int] | None = None,
) -> Step:
    """Of sequences whose numbers the host knows; ``until``: as in `Whereabouts.begun`."""
    at = Whereabouts.of(new_tokens, rings, tables.int())
    if until is not None:
        at.begun[:, 1] = torch.tensor(until, dtype=torch.int32).numpy()
    return Step(new_tokens, at, retention)


class Engine:
    """Gives out pages and rings as an engine does, and knows what each sequence was given.

    Args:
        fixed: all numbers of its steps are tensors, and kernels find them where they were before.
    """

    def __init__(
        self,
        codec: LayerCodec,
        scoring: Scoring = PLAINLY,
        backend: Backend | None = None,
        retention: Retention = PLAIN,
        fixed: bool = False,
    ) -> None:
        self.memory_of_steps = FixedSequences(torch.device("cpu"), 8) if fixed else None
        self.sink = 0 if retention.slots is None else retention.slots.sink
        retention = replace(retention, slots=Slots(self.sink) if self.sink else None)
        self.codec, self.view, self.retention = codec, codec.view, retention
        self.angles = angles_of(self.view.head_size)
        self.layer = PagedPast(codec, BLOCK, self.angles, backend or REFERENCE, TORCH, sink=self.sink)
        self.scoring = scoring
        self.memory = torch.full((64, self.layer.layout.nbytes + 128), 99, dtype=torch.uint8)
        self.rings = torch.full((8, retention.capacity, self.layer.row), torch.nan)
        self.free = torch.randperm(64).tolist()
        self.tables: dict[int, list[int]] = {}
        self.past: dict[int, list[Tensor]] = {}  # of each sequence: its rows, [T, W]

    def step(self, new: dict[int, int]) -> float:
        """Run the layer on so many new tokens of these sequences; the largest error, relative."""
        query, out, new_tokens = self.run(new)
        worst = 0.0
        for number, tokens in zip(new, new_tokens, strict=True):
            own = slice(tokens.start, tokens.stop)
            wanted = self.expected(number, query[own])
            worst = max(worst, float((out[own] - wanted).norm() / wanted.norm()))
        return worst

    def run(self, new: dict[int, int]) -> tuple[Tensor, Tensor, list[NewTokens]]:
        """The queries and outputs ``[T, H, D]`` of so many new tokens of these sequences."""
        view, start = self.view, 0
        new_tokens, tables = [], []
        count = sum(new.values())
        query = torch.randn(count, view.query_heads, view.head_size)
        # As parts of one projection, of which the key may have been normalized since.
        both = torch.randn(count, 2 * view.kv_heads, view.head_size)
        key, value = both.chunk(2, 1)
        if len(self.past) % 2:
            key = key.contiguous()
        for number, tokens in new.items():
            table, past = self.tables.setdefault(number, []), self.past.setdefault(number, [])
            before = sum(map(len, past))
            while len(table) * BLOCK < before + tokens:
                table.append(self.free.pop())
            new_tokens.append(NewTokens(start, start + tokens, before))
            tables.append(table + [0] * (20 - len(table)))
            own = slice(start, start + tokens)
            past.append(torch.cat([key[own].flatten(1), value[own].flatten(1)], -1))
            start += tokens
        out = torch.full_like(query, torch.nan)
        self.layer.bind(self.memory, self.rings, self.rings.shape[1])
        rings, table = [number % 8 for number in new], torch.tensor(tables, dtype=torch.int32)
        step = step_of(new_tokens, rings, table, self.retention)
        if self.memory_of_steps is not None:
            *numbers, table = Whereabouts.of(new_tokens, rings, table)
            there = Whereabouts(*(torch.from_numpy(each) for each in numbers), table)
            step = Step(new_tokens, there, self.retention, self.memory_of_steps)
        self.layer.attend(AttentionCall(query, key, value, None, *self.scoring), step, out)
        return query, out, new_tokens

    def refuse(self, number: int, drafts: int) -> None:
        """Forget the newest tokens of a sequence, as an engine does with drafts that were wrong."""
        self.past[number] = [torch.cat(self.past[number])[:-drafts]]

    def expected(self, number: int, query: Tensor) -> Tensor:
        view, (scaling, softcap, logits) = self.view, self.scoring
        rows = torch.cat(self.past[number])
        before = len(rows) - len(query)
        numbers = (torch.tensor([number]) for number in (before, len(rows), 0))
        sealed = int(self.retention.sealed(*numbers))
        keys, values = (
            part.unflatten(-1, (view.kv_heads, view.head_size)).clone()
            for part in rows.split(view.kv_width, -1)
        )
        if sealed:
            coded = slice(self.sink, sealed)
            found = self.decoded(keys[:sealed], values[:sealed])
            keys[coded], values[coded] = (states[self.sink :] for states in found)
        groups = view.query_heads // view.kv_heads
        keys, values = (t.double().repeat_interleave(groups, 1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        later = torch.ones(scores.shape[1:]).triu(len(keys) - len(query) + 1).bool()
        scores = scores.masked_fill(later, -torch.inf)
        if logits is not None:  # one more score, whose value is 0
            scores = torch.cat([scores, logits.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values).float()

    def decoded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What a stream of the library reads of these tokens."""
        places = torch.arange(len(keys))
        if not self.codec.rotated:
            keys = self.angles.remove_rope(keys.unflatten(0, (-1, BLOCK)), places[::BLOCK]).flatten(0, 1)
        rows = torch.cat([keys.flatten(1), values.flatten(1)], -1).unflatten(0, (-1, BLOCK))
        stream = Stream(self.codec.segments, BLOCK, TORCH)
        excluded = (torch.arange(len(keys)) < self.sink).view(-1, BLOCK)
        packed = pack_rows([stream], [self.codec.encode(rows[None], None)[0]], excluded)[0]
        stream.seal(packed, 1)
        read = self.codec.recall(stream.read(torch.float32, len(keys)), None)
        keys, values = (t[0].view(keys.shape) for t in self.codec.rebuild(read))
        return keys if self.codec.rotated else self.angles.apply_rope(keys, places), values


KERNEL_SPECS = [
    "kivi-4bit:group=32",
    "kivi-2bit:group=32,rope=post",
    "int4-gs32:group=32,rope=pre",
    "nf4:group=32",
    "kvquant-3bit-5%:group=32,datatype=nf,scales=online,sink=0",
    "kvquant-2bit-10%:group=32,datatype=int,scales=online,rope=post,sink=0",
    "xquant-4bit:group=32,form=gqa",
    "tc-2bit:group=32,sink=0",
    "tc-2bit:group=32,sink=0,basis=keys-first",
    "quarot-4bit:group=32",
    "turboquant-3bit:group=32",
    "kvarn-k4v2:group=32",
    "q4_0:group=32,rotate=true",
]
SPECS = [
    "full:group=32",
    "kivi-4bit:group=32",
    "kivi-2bit:group=32,rope=post",
    "int4:group=32",
    "kvquant-3bit-5%:group=32,datatype=nf,scales=online,sink=0",
    "xquant-4bit:group=32,form=gqa",
    "tc-2bit:group=32,sink=0",
    "tc-2bit:group=32,sink=0,basis=keys-first",
]


STEPS = [
    {0: 70, 1: 5},
    {0: 1, 1: 1, 2: 32},
    {1: 25, 2: 1},  # 1 is one token short of a block
    {1: 1, 0: 1},
    {1: 1, 2: 40, 3: 31},
    {0: 24, 3: 1},
    *[{0: 1, 1: 1, 2: 1, 3: 1}] * 35,
]
KEPT = [
    PLAIN,
    Retention(BLOCK, capacity=2 * BLOCK, tail=20),
    Retention(BLOCK, BLOCK, 0, True),
    Retention(BLOCK, BLOCK, slots=Slots(3)),
    Retention(BLOCK, BLOCK, 0, True, Slots(1)),
]

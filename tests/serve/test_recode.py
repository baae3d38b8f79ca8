"""Recoder: blocks of an engine's layers, stored by the same method or another, and given back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration, rows_held
from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.kernels.torch import REFERENCE
from xquant.models import view_model
from xquant.past.angles import Angles
from xquant.past.packer import TORCH, Packer
from xquant.past.paged import PagedPast
from xquant.past.slots import Slots
from xquant.quant import Packed
from xquant.serve.build import codecs_of
from xquant.serve.recode import Blocks, Recoder, Stored

BLOCK, BLOCKS = 32, 3
IDS = prompt(1, BLOCK * BLOCKS).view(BLOCKS, BLOCK)
SERVED = [
    "full:group=32",
    "kivi-4bit:group=32,sink=2",
    "kvquant-3bit-1%:group=32",
    "int8:group=32",
    "quarot-4bit:group=32",
]
STORED = [
    *("tc-2bit:group=32,basis=keys-first", "tc-2bit:group=32,classes=2", "tc-cl-2bit:group=32,classes=2"),
    *("tc-2bit:group=32", "tc-cl-2bit:group=32", "tc-cl-2bit:group=32,sink=0"),
    *("kivi-2bit:group=32", "kvquant-2bit-1%:group=32", "int4:group=32,rope=post"),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=64)


def angles_of(model: Any) -> Angles:
    positions = torch.arange(BLOCK * BLOCKS)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    return Angles(*(table[0, :, : table.shape[-1] // 2] for table in (cos, sin)))


class Held:
    """Layers of an engine, with a sequence of whole blocks in pages that lie anywhere."""

    def __init__(self, model: Any, spec: str, packer: Packer = TORCH) -> None:
        method, self.angles = parse_method(spec), angles_of(model)
        views = view_model(model).compressed
        self.codecs = codecs_of(method, views, calibration(model, spec))
        self.layers = [
            PagedPast(
                codec, BLOCK, None if codec.rotated else self.angles, REFERENCE, packer, sink=method.sink
            )
            for codec in self.codecs
        ]
        for layer in self.layers:
            memory = torch.full((16, layer.layout.nbytes + 64), 99, dtype=torch.uint8)
            layer.bind(memory, torch.zeros(2, BLOCK, layer.row), BLOCK)
        self.slots = Slots(method.sink) if method.sink else None
        self.starts = torch.arange(BLOCKS) * BLOCK

    def at(self, pages: list[int]) -> Blocks:
        if self.slots is None:
            return Blocks(torch.tensor(pages), self.starts, None, IDS)
        found = self.slots.write(pages, self.starts.tolist())
        return Blocks(torch.tensor(pages), self.starts, torch.tensor(found), IDS)

    def keep(self, rows: list[Tensor], pages: list[int]) -> None:
        where = self.at(pages)
        for layer, own in zip(self.layers, rows, strict=True):
            layer.write(own.unflatten(0, (BLOCKS, BLOCK)), *where[:3])

    def blocks(self, pages: list[int]) -> list[Tensor]:
        where = self.at(pages)
        return [layer.blocks(*where[:3]) for layer in self.layers]

    def recoder(self, model: Any, spec: str | None) -> Recoder:
        if spec is None:
            return Recoder(self.layers, parse_method(self.spec), None, [])
        codecs = codecs_of(parse_method(spec), view_model(model).compressed, calibration(model, spec))
        return Recoder(self.layers, parse_method(spec), codecs, [self.angles] * len(codecs))


def cached(model: Any) -> KVCache:
    cache = KVCache(model, "full:group=32")
    with torch.inference_mode():
        model(prompt(1, BLOCK * BLOCKS), past_key_values=cache)
    return cache


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        float((one.flatten(0, 1) - other).norm() / other.norm())
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("spec", [*SERVED, "tc-2bit:group=32"])
def test_pages_are_stored_as_they_are(model: Any, spec: str) -> None:
    held = Held(model, spec)
    held.keep(rows_held(cached(model)), [7, 2, 11])
    recoder = Recoder(held.layers, parse_method(spec), None, [None] * len(held.layers))
    stored = recoder.pack(held.at([7, 2, 11]))
    assert all(len(each["packed"]) == recoder.nbytes for each in stored)
    other = Held(model, spec)
    again = Recoder(other.layers, parse_method(spec), None, [None] * len(other.layers))
    again.unpack(stored, other.at([3, 4, 0]))
    for mine, theirs in zip(held.blocks([7, 2, 11]), other.blocks([3, 4, 0]), strict=True):
        assert torch.equal(mine, theirs)


class Counted(Packer):
    """Counts what it is asked."""

    packed = unpacked = 0

    def pack(self, *of: Any) -> Packed:
        self.packed += 1
        return super().pack(*of)

    def unpack(self, *of: Any) -> None:
        self.unpacked += 1
        super().unpack(*of)


def test_blocks_are_packed_and_read_by_the_packer_of_their_layers(model: Any) -> None:
    packer = Counted()
    held = Held(model, "full:group=32", packer)
    held.keep(rows_held(cached(model)), [5, 9, 1])
    packer.packed = packer.unpacked = 0
    recoder = held.recoder(model, "kivi-2bit:group=32")
    kept = recoder.pack(held.at([5, 9, 1]))
    keys_and_values = 2 * len(held.layers)
    assert packer.packed == keys_and_values
    packer.unpacked = 0
    recoder.unpack(kept, held.at([0, 1, 2]))
    assert packer.unpacked == keys_and_values


@pytest.mark.parametrize("stored", STORED)
def test_what_is_stored_is_what_a_cache_would_hold(model: Any, stored: str) -> None:
    """Out of 16 bits, by the method of a cache at rest: sinks, predictions and all."""
    cache, held, other = cached(model), Held(model, "full:group=32"), Held(model, "full:group=32")
    held.keep(rows_held(cache), [5, 9, 1])
    kept = held.recoder(model, stored).pack(held.at([5, 9, 1]))
    other.recoder(model, stored).unpack(kept, other.at([0, 1, 2]))
    wanted = rows_held(cache.converted(stored, calibration(model, stored)))
    # A page has room for so many outliers.
    near = 0.15 if stored.startswith("kvquant") else 0.05
    assert distance(other.blocks([0, 1, 2]), wanted) < near
    assert distance(other.blocks([0, 1, 2]), rows_held(cache)) > 0.05


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("served", SERVED)
def test_every_method_is_stored_by_every_other(model: Any, served: str, stored: str) -> None:
    """Blocks come back one by one, in any pages, and near what they were."""
    rows = rows_held(cached(model))
    held, other = Held(model, served), Held(model, served)
    held.keep(rows, [5, 9, 1])
    kept = held.recoder(model, stored).pack(held.at([5, 9, 1]))
    recoder = other.recoder(model, stored)
    pages, starts, slots, ids = other.at([0, 1, 2])
    for i in (1, 0, 2):
        own = slots if i == 0 else None if slots is None else slots[:0]
        one = slice(i, i + 1)
        recoder.unpack(kept[one], Blocks(pages[one], starts[one], own, ids[one]))
    error = distance(other.blocks([0, 1, 2]), [own.flatten(0, 1) for own in held.blocks([5, 9, 1])])
    assert error < 0.9
    sinks = parse_method(stored).sink
    assert [each["sinks"].shape[1] for each in kept] == [sinks, 0, 0]


def test_other_blocks_are_refused(model: Any) -> None:
    held = Held(model, "full:group=32")
    held.keep(rows_held(cached(model)), [5, 9, 1])
    recoder = held.recoder(model, "tc-2bit:group=32")
    kept, before = recoder.pack(held.at([5, 9, 1])), held.blocks([5, 9, 1])
    wrong: list[Stored] = [
        {},
        {**kept[0], "packed": kept[0]["packed"][1:]},
        {**kept[0], "packed": kept[0]["packed"].int()},
        {**kept[0], "sinks": kept[0]["sinks"][1:]},
        kept[1],
    ]
    for each in wrong:
        with pytest.raises(ValueError, match="something else than the method stores"):
            recoder.unpack([each, *kept[1:]], held.at([5, 9, 1]))
    for mine, theirs in zip(before, held.blocks([5, 9, 1]), strict=True):
        assert torch.equal(mine, theirs)

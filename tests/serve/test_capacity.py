"""How many tokens fit: pages of SmolLM2 against the formula of docs/format.md and vLLM's own cache."""

from math import ceil
from typing import Any

import pytest
import torch

from support.models import prompt, tiny
from xquant import Calibration, compat, parse_method
from xquant.analysis.shapes import shape_config
from xquant.methods import LayerCodec
from xquant.past.pages import PageLayout
from xquant.quant import Segment
from xquant.quant.ranked import Ranked
from xquant.serve.build import Model, codecs_of
from xquant.serve.capacity import (
    Room,
    States,
    StockRoom,
    Windows,
    left_beside_recent,
    planned_states,
    room_in,
    room_of,
    stock_room,
)
from xquant.serve.fit import wanted

MODEL = Model(shape_config("smollm2"), torch.bfloat16)
WIDTH, TOKENS = 192, 128


def _codecs(spec: str) -> list[LayerCodec]:
    method, made = parse_method(spec), None
    if method.needs_calibration:  # layers that get more and fewer bits
        found = {}
        for name, each in method.expected(MODEL.layers).items():
            found[name] = torch.zeros(each.shape, dtype=each.dtype)
            if name.endswith("profile"):
                layer, channels = int(name.partition(".")[0]), each.shape[0]
                found[name] = torch.linspace(5 + layer / 10, 0, channels)
        made = Calibration(found, method.calibrated_as, "none", "none", "1.0")
    return codecs_of(method, MODEL.layers, made)


def _room(spec: str) -> Room:
    return room_of(_codecs(spec), wanted({"xquant": spec}).retention(), MODEL)


def _rows(bits: int, channels: int) -> int:
    return TOKENS * bits * channels // 8


FORMULAS: dict[str, Any] = {
    "full": lambda codec: TOKENS * 2 * WIDTH * 2,
    "kivi-4bit": lambda codec: 2 * _rows(4, WIDTH) + 4 * WIDTH + 4 * TOKENS * ceil(WIDTH / 128),
    "kivi-2bit": lambda codec: 2 * _rows(2, WIDTH) + 4 * WIDTH + 4 * TOKENS * ceil(WIDTH / 128),
    "int4-gs64:rope=post": lambda codec: 2 * (_rows(4, WIDTH) + 4 * TOKENS * ceil(WIDTH / 64)),
    "tc-2bit": lambda codec: sum(map(_ranked, codec.segments)),
    "tc-2bit:basis=keys-first": lambda codec: sum(map(_ranked, codec.segments)),
}


def _ranked(segment: Segment) -> int:
    assert isinstance(segment.quantizer, Ranked)
    codes = sum(TOKENS * width.bits * count / 8 for width, count in segment.quantizer.runs)
    return int(codes) + ceil(segment.channels / 2) + ceil(TOKENS / 2)


@pytest.mark.parametrize("spec", FORMULAS)
def test_bytes_of_a_page_follow_the_formula(spec: str) -> None:
    codecs, room = _codecs(spec), _room(spec)
    for codec, nbytes in zip(codecs, room.pages, strict=True):
        layout = PageLayout(codec.segments, TOKENS)
        assert layout.packed_nbytes == FORMULAS[spec](codec)
        assert layout.packed_nbytes <= nbytes < layout.packed_nbytes + 64 * len(layout.places)
    # Pages of layers lie after each other, however unequal they are.
    assert sum(room.pages) <= len(codecs) * room.page < sum(room.pages) + TOKENS * len(codecs)
    assert room.starts[-1] + room.pages[-1] <= len(codecs) * room.page


@pytest.mark.parametrize(("spec", "times"), [("kivi-4bit", 3.4), ("kivi-2bit", 5.5), ("tc-2bit", 6)])
def test_as_many_tokens_fit_as_is_asked(spec: str, times: float) -> None:
    """At 8,192 positions in bf16, rings included."""
    own = stock_room(MODEL).tokens(2**29, 8192)
    assert _room(spec).tokens(2**29, 8192) >= times * own


def test_windows_take_blocks_beside_pages() -> None:
    """A block has the pages of both layers, or states of two of the five layers with windows, and these have
    no more tokens than a window and a step."""
    room = Room(128, [4096, 4096], 8192, [Windows(5, 4000, 100, 128)])
    assert (room.page, room.nbytes, room.blocks_of_rings) == (4096, 8192, 2)
    blocks = 8 + 2 + 3 * (ceil((99 + 256) / 128) + 1)
    assert room.tokens(100 * 8192, 1024, batched=256) == int(100 / blocks * 1024)
    # vLLM parts layers with pages, were all of one size.
    assert Room(128, [4096, 4096], 4096, [Windows(5, 4096, 100, 128)]).page == 4096 + 128


def test_stock_shares_blocks_by_the_rarest_kind() -> None:
    assert StockRoom(128, [4096] * 2, 0, [Windows(5, 4096, 100, 128)]).nbytes == 2 * 4096
    assert StockRoom(128, [4096] * 4, 0, [Windows(5, 4096, 100, 128)]).nbytes == 5 * 4096


def test_a_ring_larger_than_a_block_takes_one_of_its_own() -> None:
    room = Room(128, [1000, 1000, 1000], 8192)
    assert (room.page, room.nbytes, room.blocks_of_rings) == (1024, 8192, 3)
    assert room.tokens(10 * 8192, 256) == int(10 / (2 + 3) * 256)


def test_what_recent_tokens_leave() -> None:
    """Of the tokens that fit; the longer requests are, the more."""
    asked = {spec: wanted({"xquant": spec}) for spec in ("kivi-4bit", "kivi-4bit:tail=5000")}
    assert left_beside_recent(asked["kivi-4bit"], MODEL, 0, 8192) == 1
    short, long = (left_beside_recent(asked["kivi-4bit:tail=5000"], MODEL, 0, n) for n in (8192, 1 << 20))
    rooms = [room_in(each, MODEL) for each in asked.values()]
    plain, own = (room.tokens(1 << 40, 8192) for room in rooms)
    assert short == pytest.approx(own / plain, rel=1e-3) and short < long < 0.5
    assert left_beside_recent(asked["kivi-4bit"], MODEL, 2000, 8192) < 1


def test_states_are_those_of_a_model_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has a token less of a convolution than transformers, and one more for each draft."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    model = tiny("qwen3_next")
    held = model(prompt(1, 3), use_cache=True).past_key_values.layers[0]
    ((*_, channels, columns),) = (each.shape for each in compat.states_in(held, compat.CONV_STATES))
    (total,) = (each.numel() for each in compat.states_in(held, compat.RECURRENT_STATES))
    for dtype, drafts, shards in ((torch.float32, 0, 1), (torch.bfloat16, 2, 2)):
        known = Model(model.config, dtype, shards=shards)
        (found,) = planned_states(known, drafts)
        numbers = channels * (columns - 1 + drafts) + total
        layers = model.config.layer_types.count("linear_attention")
        assert found == States(layers, numbers * dtype.itemsize // shards)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    (wider,) = planned_states(known, drafts)
    assert wider.page - found.page == total * 2 // shards
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    known.config.mamba_ssm_dtype = "float32"
    assert planned_states(known, drafts) == [wider]
    assert planned_states(MODEL) == []

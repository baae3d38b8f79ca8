"""One layer: the same store however its states arrive, bytes by the pages' formulas, codes that hold
still."""

import hashlib
from collections.abc import Iterator
from math import ceil
from typing import Any

import pytest
import torch

from support.caches import calibration
from support.method_matrix import LOW
from support.models import tiny
from xquant import attach, parse_method
from xquant.methods import AttentionInputs
from xquant.past.growing_layer import CompressedLayer
from xquant.past.packer import TORCH
from xquant.past.sealing import seal
from xquant.past.tokens import TokenIndex
from xquant.quant import Ragged
from xquant.quant.pack import packed_rows
from xquant.quant.quantizer import OUTLIER_NBYTES

TOKENS, BATCH = 43, 2


def stack(model: Any, spec: str) -> tuple[list[CompressedLayer], TokenIndex]:
    """The compressed layers of an empty cache, driven without a model's forward pass."""
    method, attachment = parse_method(spec), attach(model)
    index = TokenIndex(method.sink, attachment.view.rope)
    layers: list[CompressedLayer] = []
    for codec in attachment.codecs.of(method, calibration(model, method)):
        layers.append(CompressedLayer(codec, method, index, False, layers[-1] if layers else None, TORCH))
    CompressedLayer.link(layers)
    return layers, index


def states(layers: list[CompressedLayer]) -> list[AttentionInputs]:
    """What each layer is shown of all tokens: random, with an outlier channel."""
    generator = torch.Generator().manual_seed(3)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    seen = []
    for layer in layers:
        view = layer.codec.view
        x = rows(BATCH, TOKENS, view.hidden)
        x[..., 1] *= 20
        heads = (BATCH, view.kv_heads, TOKENS, view.head_size)
        seen.append(
            AttentionInputs(x, rows(*x.shape), rows(BATCH, TOKENS, view.kv_width), rows(*heads), rows(*heads))
        )
    return seen


def feed(
    layers: list[CompressedLayer],
    index: TokenIndex,
    seen: list[AttentionInputs],
    start: int,
    stop: int,
    hold: bool = False,
) -> None:
    """Tokens ``start`` to ``stop``, bottom up, as one forward pass; ``hold``: sealed at its end."""
    positions = torch.arange(start, stop).expand(BATCH, -1)
    real = positions >= torch.tensor([[0], [5]])  # the second sequence is left-padded
    index.append(positions, real)
    for layer, all_of in zip(layers, seen, strict=True):
        layer.append(
            AttentionInputs(
                all_of.x[:, start:stop],
                all_of.residual[:, start:stop],
                all_of.raw_key[:, start:stop],
                all_of.key[:, :, start:stop],
                all_of.value[:, :, start:stop],
            ),
            hold,
        )
    seal([layer for layer in layers if layer.due])


def contents(layer: CompressedLayer) -> Iterator[tuple[str, bytes]]:
    """Every byte that a layer holds, in the order of its tokens."""
    table = layer.stream.table
    if table is not None:
        for i, packed in enumerate(layer.stream.pool):
            for name, tensor in packed.items():
                if isinstance(tensor, Ragged):
                    blocks = tensor[table.flatten()].blocks
                    yield f"ragged {name} {i}", b"|".join(b.numpy().tobytes() for b in blocks)
                else:
                    yield f"{name} {i}", tensor[table].numpy().tobytes()
    sinks = layer.sinks
    kept = {"tail": layer.tail, "sinks": sinks and sinks.rows, "columns": sinks and sinks.columns}
    for name, tensor in kept.items():
        yield name, b"" if tensor is None else tensor.numpy().tobytes()


SPECS = [
    *LOW,
    "kivi-2bit:group=8,sink=5",
    "full:group=8",
    "kivi-16bit:group=8,sink=3",
    "xquant-cl-16bit:group=8,form=gqa",
]


@pytest.mark.parametrize(
    ("step", "hold"), [(1, True), (5, True), (5, False), (8, False), (19, True), (19, False)]
)
@pytest.mark.parametrize("spec", SPECS)
def test_the_same_states_give_the_same_store_however_they_arrive(spec: str, step: int, hold: bool) -> None:
    model = tiny("qwen2")
    whole, index = stack(model, spec)
    seen = states(whole)
    feed(whole, index, seen, 0, TOKENS)
    parts, index = stack(model, spec)
    for start in range(0, TOKENS, step):
        feed(parts, index, seen, start, min(start + step, TOKENS), hold)
    for one, other in zip(whole, parts, strict=True):
        assert one.stream.lengths == other.stream.lengths
        assert dict(contents(one)) == dict(contents(other))


@pytest.mark.parametrize("spec", SPECS)
def test_a_sealed_block_holds_still(spec: str) -> None:
    layers, index = stack(tiny("llama"), spec)
    seen = states(layers)
    kept: dict[tuple[int, int, str], str] = {}
    for start in range(0, TOKENS, 3):
        feed(layers, index, seen, start, min(start + 3, TOKENS))
        for i, layer in enumerate(layers):
            for j, packed in enumerate(layer.stream.pool):
                for name, tensor in packed.items():
                    blocks = tensor.blocks if isinstance(tensor, Ragged) else tensor
                    for block, held in enumerate(blocks):
                        digest = hashlib.sha256(held.numpy().tobytes()).hexdigest()
                        key = (i, j * 1000 + block, name)
                        assert kept.setdefault(key, digest) == digest
    assert kept


def affine(tokens: int, bits: int, channels: int, group: int, per: str) -> int:
    groups = tokens * ceil(channels / group) if per == "token" else channels * ceil(tokens / group)
    return packed_rows(tokens, bits) * channels + 4 * groups


FORMULAS = [
    ("kivi-3bit:group=1", lambda d, c: [affine(1, 3, c, 1, "channel") + affine(1, 3, c, 1, "token")] * 5),
    ("full:group=8", lambda d, c: [8 * 2 * c * 4] * 5),
    (
        "kivi-2bit:group=12",
        lambda d, c: [affine(12, 2, c, 12, "channel") + affine(12, 2, c, 12, "token")] * 5,
    ),
    (
        "kivi-4bit:group=8,key_bits=6,value_bits=3,first_layers=1,first_bits=7",
        lambda d, c: [
            affine(8, k, c, 8, "channel") + affine(8, v, c, 8, "token")
            for k, v in [(7, 7), *[(6, 3)] * 4]
        ],
    ),
    ("int3-gs10:group=8", lambda d, c: [2 * affine(8, 3, c, 10, "token")] * 5),
    ("nf4:group=8", lambda d, c: [2 * affine(8, 4, c, c, "token")] * 5),
    (
        "asymkv-1.7bit:group=8,tail=0",
        lambda d, c: [
            affine(8, 2, c, 8, "channel") + affine(8, v, c, 8, "token") for v in (2, 2, 1, 1, 1)
        ],
    ),
    (
        "crosslayer:group=8,tail=0,kq=2,vq=0,km=2,vm=0",  # layers 0 and 1, then 2 and 3, then 4 alone
        lambda d, c: [
            affine(8, 2, c, 8, "channel") + affine(8, 1, c, 8, "token"),
            affine(8, 2, c, 8, "channel") + affine(8, 1, c, 8, "token") - c,
            affine(8, 1, c, 8, "channel") + affine(8, 1, c, 8, "token"),
            affine(8, 1, c, 8, "channel") + affine(8, 1, c, 8, "token") - 2 * c,
            affine(8, 1, c, 8, "channel") + affine(8, 1, c, 8, "token"),
        ],
    ),
    (
        "kvlinc-2bit:group=8",
        lambda d, c: [affine(8, 2, c, 8, "channel") + affine(8, 2, c, 12, "token")] * 5,
    ),
    ("oscar-3bit:group=8,tail=0", lambda d, c: [2 * affine(8, 3, c, 12, "token")] * 5),
    ("kvquant-3bit-1%:group=8", lambda d, c: [2 * 8 * c * 3 // 8 + 4 * 8 + 2 * 8] * 5),
    ("kvquant-2bit:group=8", lambda d, c: [2 * 8 * c * 2 // 8 + 4 * 8] * 5),
    ("xquant-3bit:group=10,form=mha", lambda d, c: [affine(10, 3, d, 10, "token")] * 5),
    (
        "xquant-2bit:group=8,form=gqa,first_layers=2,first_bits=8",
        lambda d, c: [affine(8, b, c, 8, "channel") + affine(8, b, c, 8, "token") for b in (8, 8, 2, 2, 2)],
    ),
    (
        "xquant-2bit:group=8,form=gqa,outlier=true",
        lambda d, c: [8 * 2 + affine(8, 2, c - 1, 8, "channel") + affine(8, 2, c, 8, "token")] * 5,
    ),
    (
        "xquant-cl-1bit:group=8,form=mha",
        lambda d, c: [affine(8, b, d, 8, "token") for b in (4, 4, 4, 1, 1)],
    ),
    (
        "xquant-cl-2bit:group=7,form=gqa,first_layers=2,first_bits=3",
        lambda d, c: [
            affine(7, 3, c, 7, "channel") + affine(7, 3, c, 7, "token"),
            affine(7, 3, d, 7, "token"),
            *[affine(7, 2, 2 * c, 7, "token")] * 3,
        ],
    ),
]  # fmt: skip


@pytest.mark.cases(12)
@pytest.mark.parametrize(("spec", "formula"), FORMULAS, ids=[s for s, _ in FORMULAS])
def test_bytes_follow_the_formula_of_the_page(spec: str, formula: Any) -> None:
    layers, index = stack(tiny("llama"), spec + ",sink=2")
    feed(layers, index, states(layers), 0, TOKENS)
    for layer, block_bytes in zip(layers, formula(48, 24), strict=True):
        columns, rest = divmod(TOKENS, layer.stream.block)
        width = layer.codec.width * 4
        apart = OUTLIER_NBYTES * layer.stream.outliers
        assert layer.stream.nbytes == BATCH * columns * block_bytes + apart
        assert layer.tail_nbytes == BATCH * rest * 4 * layer.codec.tail_width
        assert layer.sink_nbytes == BATCH * 2 * (width + 4)
        assert layer.stream.table_nbytes == 8 * BATCH * columns
    assert index.nbytes == 10 * BATCH * TOKENS


@pytest.mark.parametrize("spec", LOW)
def test_crop_keeps_the_codes_that_remain(spec: str) -> None:
    layers, index = stack(tiny("llama"), spec)
    seen = states(layers)
    feed(layers, index, seen, 0, TOKENS)
    before = [layer.states() for layer in layers]
    codes = [dict(contents(layer)) for layer in layers]
    for layer in layers:
        layer.crop(-16)
    index.crop(TOKENS - 16)
    for layer, held, states_before in zip(layers, codes, before, strict=True):
        sealed = layer.stream.tokens
        assert layer.get_seq_length() == 27
        kept = len(layer.stream.lengths)
        for name, data in contents(layer):
            if name.startswith("ragged"):
                assert held[name].startswith(data.split(b"|")[0])
            elif " " in name:  # a packed tensor; both sequences' first blocks are as they were
                size = len(data) // (BATCH * kept)
                rows = [held[name][i : i + kept * size] for i in (0, len(held[name]) // BATCH)]
                assert data == b"".join(rows)
        # Products over another number of rows may round differently.
        for cropped, whole in zip(layer.states(), states_before, strict=True):
            torch.testing.assert_close(cropped[:, :, :sealed], whole[:, :, :sealed])
    feed(layers, index, seen, 27, TOKENS)
    for layer in layers:
        assert layer.get_seq_length() == TOKENS
        assert all(t.isfinite().all() for t in layer.states())


def test_a_layer_has_no_greatest_length() -> None:
    layer = stack(tiny("llama"), "kivi-2bit:group=8")[0][0]
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1


def test_a_layer_repeats_every_sequence() -> None:
    layers, index = stack(tiny("llama"), "kivi-2bit:group=8,sink=2")
    feed(layers, index, states(layers), 0, TOKENS)
    before = [layer.held() for layer in layers]
    for layer, held in zip(layers, before, strict=True):
        layer.batch_repeat_interleave(3)
        for now, then in zip(layer.held(), held, strict=True):
            assert torch.equal(now, then.repeat_interleave(3, 0))


def test_values_that_are_not_finite_are_refused_and_change_nothing() -> None:
    layers, index = stack(tiny("llama"), "kivi-2bit:group=8")
    seen = states(layers)
    feed(layers, index, seen, 0, 20)
    before = dict(contents(layers[0]))
    seen[0].raw_key[0, 25, 3] = torch.nan
    with pytest.raises(ValueError, match="layer 0"):
        feed(layers, index, seen, 20, 30)
    assert dict(contents(layers[0])) == before

"""QuaRot, TurboQuant, KVarN, KVLinC and llama.cpp's formats: what each keeps of a head."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.methods import LayerCodec
from xquant.methods.rotated import RotatedCodec, random_hadamard
from xquant.models import view_model
from xquant.quant import Quantizer, Segment
from xquant.quant.levels import normal_error, normal_levels
from xquant.quant.scaled import Balanced, Scaled, Sketched

SPECS = ["quarot-4bit", "turboquant-4bit", "turboquant-4bit:qjl=true", "q8_0:rotate=true"]


def through(quantizer: Quantizer, x: Tensor, excluded: Tensor | None = None) -> Tensor:
    """Blocks ``[N, n, C]``, packed and decoded; every field is as it is said to be."""
    packed = quantizer.encode(x, excluded)
    fields = quantizer.fields(*x.shape[1:])
    assert packed.keys() == fields.keys()
    for name, field in fields.items():
        tensor = packed[name]
        assert isinstance(tensor, Tensor)
        assert tensor.shape == (len(x), *field.shape) and tensor.dtype == field.dtype
    out = torch.empty_like(x)
    quantizer.decode(packed, out)
    return out


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean() / wanted.square().mean())


def codec_of(spec: str, **changes: Any) -> LayerCodec:
    method = parse_method(spec)
    return method.codecs(view_model(tiny("llama", **changes)).compressed)[0]


# -- the formats of numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_times_the_length_are_best_for_normal_numbers(bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 256) * torch.logspace(-2, 2, 64)[:, None]
    found = through(Scaled(bits, 128, normal_levels(bits), "norm"), x)
    by_token = ((found - x).square().mean(-1) / x.square().mean(-1)).mean()
    assert float(by_token) == pytest.approx(normal_error(normal_levels(bits)), rel=0.1)


def test_q8_0_and_q4_0_are_llama_cpps() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 96)
    for spec, low, high in (("q8_0", -128, 127), ("q4_0", -8, 7)):
        quantizer = codec_of(spec).segments[0].quantizer
        blocks = x.unflatten(-1, (3, 32))
        peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = (peak.abs() / 127 if spec == "q8_0" else peak / -8).half().float()
        want = ((blocks / scale).round().clamp(low, high) * scale).flatten(-2)
        torch.testing.assert_close(through(quantizer, x), want, rtol=1e-3, atol=1e-3)
        assert Segment(96, quantizer).parts(128).total() * 8 / 128 / 96 == (8.5 if spec == "q8_0" else 4.5)


def test_a_block_of_fewer_channels_has_a_scale_of_its_own() -> None:
    x = torch.cat([torch.randn(1, 8, 32), 1000 * torch.randn(1, 8, 7)], -1)
    found = through(Scaled(8, 32, torch.arange(-128, 128).float(), "peak"), x)
    assert error(found[..., :32], x[..., :32]) < 1e-4


def test_a_sketch_keeps_products_right_on_average() -> None:
    """The error of a product has no slope: shrunken codes have one."""
    torch.manual_seed(0)
    x, queries = torch.randn(8, 128, 64), torch.randn(64, 512)
    base = Scaled(1, 64, normal_levels(1), "norm")
    slopes = []
    for quantizer in (base, Sketched(base, torch.randn(64, 64))):
        found, wanted = through(quantizer, x) @ queries, x @ queries
        slopes.append(float((found * wanted).mean() / wanted.square().mean()))
    assert abs(slopes[0] - (1 - normal_error(normal_levels(1)))) < 0.03 and abs(slopes[1] - 1) < 0.03


def test_tokens_and_channels_of_any_size_are_balanced() -> None:
    torch.manual_seed(0)
    even = torch.randn(2, 128, 64)
    x = even * torch.logspace(-2, 2, 128)[:, None] * torch.logspace(-1, 1, 64)
    for per in ("token", "channel"):
        quantizer = Balanced(4, per, 32, 16)
        found = through(quantizer, x)
        relative = (found - x) / (torch.logspace(-2, 2, 128)[:, None] * torch.logspace(-1, 1, 64))
        plain = error(through(quantizer, even), even)
        assert float(relative.square().mean()) < 1.3 * plain
        assert plain < 0.02


def test_sinks_and_padding_balance_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 16, 32)
    spoilt, excluded = x.clone(), torch.zeros(1, 16, dtype=torch.bool)
    spoilt[:, :2], excluded[:, :2] = 1e4, True
    for per in ("token", "channel"):
        quantizer = Balanced(4, per, 32, 16)
        assert error(through(quantizer, spoilt, excluded)[:, 2:], x[:, 2:]) < 0.03


@pytest.mark.parametrize(
    "quantizer",
    [
        Scaled(4, 8, torch.arange(-8, 8).float(), "signed peak"),
        Sketched(Scaled(2, 8, normal_levels(2), "norm"), torch.randn(8, 8)),
        Balanced(2, "token", 8, 16),
        Balanced(2, "channel", 8, 16),
    ],
    ids=lambda q: type(q).__name__,
)
def test_edges(quantizer: Quantizer) -> None:
    for value in (0.0, 1.0, -3e-7, 6e4, torch.inf, -torch.inf):
        found = through(quantizer, torch.full((2, 8, 16), value))
        assert bool(found.isfinite().all())
    assert not through(quantizer, torch.zeros(1, 8, 16)).any()
    with pytest.raises(ValueError, match="NaN cannot be quantized"):
        quantizer.encode(torch.full((1, 8, 16), torch.nan), None)


# -- heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [12, 16, 64, 80])
def test_rotations_are_orthogonal(size: int) -> None:
    matrix = random_hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)
    assert torch.equal(matrix, random_hadamard(size))


@pytest.mark.parametrize("spec", SPECS)
def test_one_loud_channel_spoils_no_other(spec: str) -> None:
    codec = codec_of(spec, head_dim=64)
    assert isinstance(codec, RotatedCodec)
    torch.manual_seed(0)
    rows = torch.randn(1, 2, 128, codec.width)
    rows[..., 5] *= 30
    encoded = codec.encode(rows, None)
    decoded = torch.cat(
        [
            through(segment.quantizer, part)
            for segment, part in zip(
                codec.segments,
                encoded[0].split([s.channels for s in codec.segments], -1),
                strict=True,
            )
        ],
        -1,
    )
    key, value = codec.rebuild(decoded.flatten(0, 1)[None])
    found = torch.cat([key, value], -1)[0]
    assert error(found, rows.flatten(0, 2)) < (0.06 if "qjl" in spec else 0.03)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("quarot-2bit", 2 + 32 / 64),
        ("turboquant-3bit", 3 + 16 / 64),
        ("kvlinc-2bit", 2 + (32 / 128 + 32 / 64) / 2),
        ("q4_0", 4.5),
        ("q8_0:rotate=true", 8.5),
        ("nvfp4", 4.5),
        ("pairs-3bit", 3 + 16 / 64),
        ("e8-2bit", 2 + 16 / 64),
        ("kvarn-k4v2", 3 + (32 / 128 + 16 / 64) / 2 + (32 / 64 + 16 / 128) / 2),
    ],
)
def test_bits_are_those_of_the_paper(spec: str, bits: float) -> None:
    model = tiny("llama", head_dim=64)
    cache = KVCache(model, spec)
    with torch.inference_mode():
        model(prompt(1, 128), past_key_values=cache)
    assert math.isclose(cache.report().bits_per_value, bits)


def test_kvlinc_turns_values_alone() -> None:
    codec = codec_of("kvlinc-2bit", head_dim=64)
    rows = torch.randn(1, 2, 128, codec.width)
    rows[..., -5] *= 30
    key, value = codec.encode(rows, None).split([s.channels for s in codec.segments], -1)
    assert torch.equal(key, rows[..., : key.shape[-1]])
    assert value[..., -64:].std(dim=(0, 1, 2)).max() < 6
    found = torch.cat(codec.rebuild(torch.cat([key, value], -1).flatten(0, 1)), -1)
    assert error(found, rows.flatten(0, 1)) < 1e-10


def test_kvlinc_takes_the_bias_of_keys_out() -> None:
    model = tiny("qwen2", head_dim=64)
    (codec, *_) = parse_method("kvlinc-2bit").codecs(view_model(model).compressed)
    assert codec.offset is not None
    codec.offset = torch.full_like(codec.offset, 1000)
    rows = torch.randn(1, 1, 128, codec.width)
    encoded = codec.encode(rows, None)
    assert encoded[..., : len(codec.offset)].mean() < -990
    found = torch.cat(codec.rebuild(encoded.flatten(0, 1)), -1)
    torch.testing.assert_close(found, rows.flatten(0, 1), rtol=0, atol=1e-3)


def test_a_sketch_needs_a_bit() -> None:
    with pytest.raises(ValueError, match="needs 2 bits or more"):
        parse_method("turboquant-1bit:qjl=true")

"""Cross-layer XQuant against its equations, and codes that exist once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import prompt, tiny
from xquant import CrossLayer, KVCache, parse_method
from xquant.quant import Affine
from xquant.quant.affine import dequantize, quantize
from xquant.quant.pack import unpack
from xquant.quant.quantizer import dense

N = 8


def filled(model: Any, spec: str, tokens: int = 33) -> KVCache:
    cache = KVCache(model, spec)
    with torch.inference_mode():
        model(prompt(2, tokens), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("eta", [0.0, 0.045, 1 / 6, 1 / 3, 0.5])
@pytest.mark.parametrize(("per", "dim"), [("channel", -2), ("token", -1)])
def test_eta_is_equation_9(bits: int, eta: float, per: Any, dim: int) -> None:
    x = torch.randn(2, N, 6)
    packed = Affine(bits, per, 0, eta).encode(x, None)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    codes = ((x - low) / step).round()
    want = codes * (1 - 2 * eta) * step + low + eta * step * (2**bits - 1)
    back = torch.empty_like(x)
    Affine(bits, per, 0, eta).decode(packed, back)
    # fp16 scales and zeros may flip a code that lies half way.
    flipped = (unpack(dense(packed, "codes"), bits, N).float() - codes).abs() > 0
    assert flipped.float().mean() < 0.02
    torch.testing.assert_close(back[~flipped], want[~flipped], atol=6e-3, rtol=6e-3)
    plain = Affine(bits, per, 0).encode(x, None)
    assert torch.equal(dense(plain, "codes"), dense(packed, "codes"))


def test_the_equivalent_bit_width_is_the_papers() -> None:
    assert CrossLayer(kq=30, vq=2, km=32, vm=16).equivalent_bits(32) == 1.375
    assert CrossLayer(kq=32, vq=32, km=32, vm=32).equivalent_bits(32) == 2
    # Table 5: all of the keys and the lowest 8 layers' values as they are, the others in pairs.
    assert CrossLayer(kq=32, vq=32, km=32, vm=8).equivalent_bits(32) == 1.625
    assert CrossLayer().equivalent_bits(32) == 1.375
    # One layer of three holds the codes of all.
    assert CrossLayer(kq=0, vq=0, km=0, vm=0, span=3).equivalent_bits(3) == 1 / 3


def test_a_cache_of_32_layers_holds_those_bits() -> None:
    model = tiny("llama", num_hidden_layers=32)
    spec = "crosslayer:kq=30,vq=2,km=32,vm=16,tail=0,group=16"
    report = filled(model, spec).report()
    assert report.code_bits == 1.375
    assert report.bits_per_value > 2.3  # scales and zeros of groups of 16


def test_a_layer_reads_the_codes_of_its_dominant_layer_with_its_own_scales() -> None:
    model = tiny("llama", num_hidden_layers=4)
    spec = "crosslayer:kq=0,vq=0,km=0,vm=2,eta1=0.1,tail=0,group=8"
    cache = filled(model, spec)
    lower, upper = cache.compressed[2:]
    for number, dim in ((0, -2), (1, -1)):
        width = 8 if dim == -1 else N
        lent, own = lower.stream.pool[number], upper.stream.pool[number]
        assert set(lent) == {"codes", "scale", "zero"} and set(own) == {"scale", "zero"}
        codes = unpack(lent["codes"].whole(), 1, N).float()
        zero, scale = (own[name].whole().float().repeat_interleave(width, dim) for name in ("zero", "scale"))
        want = zero + scale * codes
        read = upper.stream.read(torch.float32, 32)
        part = read.split(24, -1)[number].reshape(-1, N, 24)
        torch.testing.assert_close(part, want)
    keys_only = cache.compressed[1].stream.pool  # below vm: its values have codes of their own
    assert set(keys_only[0]) == {"scale", "zero"} and "codes" in keys_only[1]


@pytest.mark.parametrize("tail", [0, 10])
@torch.inference_mode()
def test_tokens_that_are_not_sealed_read_the_codes_of_the_dominant_layer_too(tail: int) -> None:
    model = tiny("llama", num_hidden_layers=2)
    spec = f"crosslayer:kq=0,vq=0,km=0,vm=0,eta1=0,tail={tail},group=8"
    cache, got = KVCache(model, spec, attend="store"), []

    def look(module: Any, args: tuple[Tensor], output: Tensor) -> None:
        got.append(output)

    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(look)
    model(prompt(2, 43), past_key_values=cache)
    codes, _, _ = quantize(got[0], 1, -1, 8)
    for layer, values in zip(cache.layers, got, strict=True):
        _, scale, zero = quantize(values, 1, -1, 8)
        want = dequantize(codes, scale, zero, -1, 8, torch.empty_like(values))
        torch.testing.assert_close(layer.values.transpose(1, 2).flatten(2), want)


@pytest.mark.parametrize("merge", ["round", "floor", "ceil"])
@pytest.mark.parametrize(("span", "gamma"), [(2, 0.5), (2, 0.7), (3, 0.5), (2, 1.0)])
def test_an_average_is_of_the_codes_that_each_layer_would_have(merge: str, span: int, gamma: float) -> None:
    model = tiny("llama", num_hidden_layers=6)
    layers = "km=0,vm=0,kq=6,vq=0,eta1=0,eta2=0,tail=0,group=8"
    spec = f"crosslayer:{layers},merge={merge},span={span},gamma={gamma}"
    alone = "crosslayer:km=6,vm=6,kq=6,vq=0,eta1=0,eta2=0,tail=0,group=8"
    # The same tokens in one chunk: what layers see does not depend on what is stored.
    mixed, own = filled(model, spec), filled(model, alone)
    weights = torch.tensor([gamma] + [(1 - gamma) / (span - 1)] * (span - 1), dtype=torch.float64)
    rounded = getattr(torch, merge)
    for first in range(0, 6, span):
        for number, bits in ((0, 2), (1, 1)):
            each = [
                unpack(layer.stream.pool[number]["codes"].whole(), bits, N).double()
                for layer in own.compressed[first : first + span]
            ]
            mean = sum(w * c for w, c in zip(weights, each, strict=True))
            assert isinstance(mean, torch.Tensor)
            held = mixed.compressed[first].stream.pool[number]["codes"].whole()
            got = unpack(held, bits, N).double()
            assert torch.equal(got, rounded(mean.round(decimals=6)))
            for layer in mixed.compressed[first + 1 : first + span]:
                assert "codes" not in layer.stream.pool[number]


def test_codes_of_a_layer_above_cannot_be_attended_to_alone() -> None:
    model = tiny("llama")
    for options in ("dominant=1", "merge=round"):
        spec = f"crosslayer:{options}"
        with pytest.raises(ValueError, match="stores codes of a layer above"):
            KVCache(model, spec, attend="store")
        KVCache(model, spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("kq=30,vq=2,km=32,vm=16", "kq=30 but 5 layers are compressed"),
        ("vm=6", "vm=6 but 5 layers are compressed"),
        ("kq=3,km=2", "with kq=3 and km=2, layers 2 to 3 would share codes of 1 and 2 bits"),
        ("vq=1,vm=0", "with vq=1 and vm=0, layers 0 to 1 would share codes of 1 and 2 bits"),
        ("vq=1,vm=0,merge=ceil", "layers 0 to 1 would share codes of 1 and 2 bits"),
        ("high=16,vm=0,vq=4", "would share codes of 16 bits"),
    ],
)
def test_layers_that_do_not_fit_are_refused(options: str, message: str) -> None:
    with pytest.raises(ValueError, match="layers") as error:
        KVCache(tiny("llama"), f"crosslayer:{options}")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_odd_bounds_that_mix_nothing_are_allowed() -> None:
    model = tiny("llama")
    KVCache(model, "crosslayer:kq=3,km=5")  # keys are not shared
    KVCache(model, "crosslayer:kq=5,km=3,vq=0,vm=1")
    assert parse_method("crosslayer:vq=0,vm=1").bounds(5)[3] == 1  # type: ignore[attr-defined]
    # Sharing from layer 1 on: it shared from layer 0, which holds its own codes anyway.
    cache = KVCache(model, "crosslayer:kq=0,vq=0,km=5,vm=1")
    assert [layer.stream.segments[1].shared for layer in cache.compressed] == [
        *(False, True, False, True, False)
    ]


def test_a_span_that_is_not_whole_shares_nothing() -> None:
    cache = filled(tiny("llama"), "crosslayer:kq=0,vq=0,km=0,vm=0,tail=0,group=8")
    borrowing = [[s.shared for s in layer.stream.segments] == [True, True] for layer in cache.compressed]
    assert borrowing == [False, True, False, True, False]

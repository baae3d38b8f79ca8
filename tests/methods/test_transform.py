"""Transform coding: bits that add up, states that come back, predictions that are the same on both ways."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.caches import calibration, make_cache
from support.models import prompt, tiny
from xquant import KVCache, attach, files, parse_method
from xquant.calibrators.run import own_calibration


def filled(model: Any, spec: str, tokens: int = 128, attend: str = "chunk") -> KVCache:
    cache = make_cache(model, spec, attend)
    with torch.inference_mode():
        model(prompt(2, tokens), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("bits", [1.1, 2, 2.7, 4])
@pytest.mark.parametrize(("name", "basis"), [("tc", "joint"), ("tc", "keys-first"), ("tc-cl", "joint")])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_budget_is_spent_and_not_more(family: str, name: str, basis: str, bits: float) -> None:
    model = tiny(family)
    cache = filled(model, f"{name}-{bits}bit:group=64,basis={basis}")
    held = sum(layer.stream.nbytes for layer in cache.compressed)
    values = sum(2 * layer.codec.view.kv_width * layer.stream.tokens * 2 for layer in cache.compressed)
    per_token = 1 / sum(2 * layer.codec.view.kv_width for layer in cache.compressed)
    assert bits - 2 * per_token - 0.02 < 8 * held / values <= bits


@pytest.mark.parametrize("name", ["tc", "tc-{}:basis=keys-first", "tc-cl", "tc-cl-{}:reach=1"])
def test_more_bits_bring_states_back_better(name: str) -> None:
    model = tiny("llama")
    full = filled(model, "full:group=64")
    errors = []
    for bits in (1, 2, 4, 8):
        head = name.format(f"{bits}bit") if "{}" in name else f"{name}-{bits}bit"
        cache = filled(model, head + (",group=64" if ":" in head else ":group=64"))
        error = 0.0
        for layer, exact in zip(cache.compressed, full.compressed, strict=True):
            for found, true in zip(layer.states(), exact.states(), strict=True):
                error += float((found - true).norm() / true.norm())
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


def uneven(kv_heads: list[int]) -> Any:
    """A model whose layers differ in their key/value heads."""
    model = tiny("llama")
    torch.manual_seed(0)
    for index, (layer, heads) in enumerate(zip(model.model.layers, kv_heads, strict=True)):
        config = copy.deepcopy(model.config)
        config.num_key_value_heads = heads
        layer.self_attn = type(layer.self_attn)(config, index)
        for projection in layer.self_attn.children():
            torch.nn.init.normal_(projection.weight, std=0.3)
    return model


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_layers_may_differ_in_their_heads(reach: int) -> None:
    model = uneven([2, 4, 1, 1, 4])
    full, cache = filled(model, "full"), filled(model, f"tc-cl-8bit:group=64,reach={reach}")
    for layer, exact in zip(cache.compressed, full.compressed, strict=True):
        for found, true in zip(layer.states(), exact.states(), strict=True):
            assert (found - true).norm() < 0.1 * true.norm()


def test_sinks_are_kept_in_16_bits() -> None:
    model = tiny("llama")
    full, cache = filled(model, "full:group=64"), filled(model, "tc-cl-1bit:group=64,sink=3")
    for layer, exact in zip(cache.compressed, full.compressed, strict=True):
        for found, true in zip(layer.states(), exact.states(), strict=True):
            torch.testing.assert_close(found[:, :, :3], true[:, :, :3], atol=4e-3, rtol=2e-3)


def test_one_artifact_serves_every_budget() -> None:
    model = tiny("llama")
    found = calibration(model, "tc-cl-2bit")
    for spec in ("tc-cl-1bit:group=64", "tc-cl-3.3bit:sink=0,tail=7"):
        assert parse_method(spec).calibrated_as == "tc-cl-2bit"
        KVCache(model, spec, calibration=found)
    with pytest.raises(ValueError, match="the calibration is for tc-cl-2bit, not for tc-2bit"):
        KVCache(model, "tc-1bit", calibration=found)


def test_bits_that_do_not_pay_for_the_scales_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="scales of blocks of 16 tokens alone take"):
        KVCache(model, "tc-0.2bit:group=16", calibration=calibration(model, "tc-2bit"))


def test_groups_that_are_no_whole_circles_are_refused() -> None:
    with pytest.raises(ValueError, match="group=24 is not a multiple of 16"):
        parse_method("tc-2bit:group=24")
    with pytest.raises(ValueError, match="classes=4 needs blocks of a multiple of 64 tokens, not group=96"):
        parse_method("tc-2bit:group=96,classes=4")


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("tc-2bit:classes=2,basis=head", "basis=joint"),
        ("tc-2bit:classes=2,metric=identity", "metric=fisher"),
        ("tc-cl-2bit:classes=4,span=3", "span=1"),
    ],
)
def test_classes_of_tokens_refuse_what_they_do_not_go_with(spec: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"classes=[24] needs {wanted}"):
        parse_method(spec)


class Words:
    """A tokenizer of a few made-up tokens."""

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % 100 for letter in text[:4]]}


def test_a_calibration_of_its_own_is_made_once_and_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(files.CACHE, str(tmp_path))
    monkeypatch.setattr("xquant.methods.Transform.calibration_size", (40, 2))
    model, method = tiny("llama"), parse_method("tc-2bit:group=16")
    with pytest.raises(ValueError, match="own_calibration"):
        KVCache(model, method)
    made = own_calibration(model, Words(), method)
    assert "generated (seed 0)" in made.text
    (file,) = tmp_path.glob("calibrations/tc-*")
    written = file.stat().st_mtime_ns
    assert own_calibration(model, Words(), parse_method("tc-1.5bit")) == made
    assert file.stat().st_mtime_ns == written
    # Another method reads the same text.
    assert own_calibration(model, None, "tc-cl-1bit").text == made.text
    cache = KVCache(model, method)
    with torch.inference_mode():
        model(prompt(1, 20), past_key_values=cache, use_cache=True)
    assert cache.report().bits_per_value > 0
    with pytest.raises(ValueError, match="own_calibration"):
        KVCache(tiny("qwen3"), method)  # another model


def test_a_damaged_calibration_is_made_anew(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.CACHE, str(tmp_path))
    monkeypatch.setattr("xquant.methods.Transform.calibration_size", (40, 2))
    model, method = tiny("llama"), parse_method("tc-2bit:metric=identity")
    made = own_calibration(model, Words(), method)
    (file,) = tmp_path.glob("calibrations/tc-*")
    file.write_bytes(b"cut short")
    assert own_calibration(model, Words(), method) == made


def test_what_is_kept_is_checked_before_it_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.CACHE, str(tmp_path))
    monkeypatch.setattr("xquant.methods.Transform.calibration_size", (40, 2))
    model, method = tiny("llama"), parse_method("tc-2bit:metric=identity")
    made = own_calibration(model, Words(), method)
    (file,) = tmp_path.glob("calibrations/tc-*")
    (text,) = tmp_path.glob("calibrations/text-*")
    halved = made.tensors["0.usual"][::2]
    replace(made, tensors={**made.tensors, "0.usual": halved}).save(file)
    with pytest.raises(ValueError, match="needs a calibration"):  # what is of no use is not there
        KVCache(model, method)
    for ids in (
        torch.full((2, 40), 10**6),
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(2, 40),
    ):
        save_file({"ids": ids}, text)
        assert own_calibration(model, Words(), method) == made
        file.unlink()


@pytest.mark.parametrize("spec", ["tc-2bit", "tc-2bit:basis=head", "tc-cl-2bit", "tc-cl-2bit:classes=2"])
def test_packers_are_told_what_errors_of_tokens_cost(spec: str) -> None:
    """It follows from rows, where what a prediction leaves of them is packed, too."""
    model, method = tiny("llama"), parse_method(spec)
    views, found = attach(model).view.compressed, calibration(model, method)
    assert found is not None
    for number, codec in enumerate(method.codecs(views, found)):
        width = codec.view.state_width
        rows, predicted = torch.randn(2, 1, 128, width, generator=torch.Generator().manual_seed(number))
        packed = codec.encode(rows[None], predicted[None] if "cl" in spec else None)[0]
        (segment,) = codec.segments
        quantizer = segment.quantizer.parts[0] if "classes" in spec else segment.quantizer
        told, wanted = packed @ quantizer.costs, rows @ found.tensors[f"{number}.costs"]
        above = (told - told.mean(), wanted - wanted.mean())
        torch.testing.assert_close(*above, atol=0.02 * float(above[1].std()), rtol=0)
        if "cl" in spec:
            read = torch.empty_like(packed)
            segment.quantizer.decode(segment.quantizer.encode(packed, None), read)
            assert read.shape[-1] == width + 1 and not read[..., -1].any()

"""What a calibration must hold: found by calibrating, planned without numbers, and nothing else is taken."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.caches import calibration
from support.models import prompt, tiny
from xquant import Calibration, KVCache, attach, parse_method
from xquant.calibration import Expected, check
from xquant.calibrators import run
from xquant.calibrators.run import calibrate_on

HALVES = Expected((2, 3), torch.float16, least=-4, most=4, rising=True)


@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    "spec",
    [
        *("tc-2bit", "tc-cl-2bit", "tc-cl-2bit:reach=1,basis=head", "kvquant-2bit-1%"),
        "tc-2bit:basis=keys-first",
        *("tc-2bit:classes=2", "tc-cl-2bit:classes=4"),
        *("kvquant-2bit-1%:per=matrix,scales=online", "kvquant-2bit:datatype=nf"),
        *("oscar-2bit", "oscar-4bit:matrix=layer,sink=4"),
        *("kvtc-4bit", "kvtc-4bit:span=3,basis=joint"),
    ],
)
def test_what_is_found_and_what_is_planned_is_what_is_expected(family: str, spec: str) -> None:
    method, views = parse_method(spec), attach(tiny(family)).view.compressed
    expected = method.expected(views)
    found = calibrate_on(tiny(family), prompt(2, 40), method).tensors
    for tensors in (found, {name: wanted.blank() for name, wanted in expected.items()}):
        check(tensors, expected)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (torch.zeros(2, 3), r"is float32 \[2, 3\], not float16 \[2, 3\]"),
        (torch.zeros(3, 2).half(), r"is float16 \[3, 2\], not"),
        (torch.tensor([[0, 0, torch.nan], [0, 0, 0]]).half(), "holds NaN or infinity"),
        (torch.tensor([[0, 0, 0], [0, 0, torch.inf]]).half(), "holds NaN or infinity"),
        (torch.tensor([[-5, 0, 0], [0, 0, 1]]).half(), "holds -5 to 1, not -4 to 4"),
        (torch.tensor([[0, 0, 1], [0, 0, 0]]).half(), "is not in rising order"),
    ],
)
def test_a_tensor_that_is_something_else_is_named(tensor: torch.Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=f"'a' of the calibration {fault}.*: calibrate again"):
        check({"a": tensor}, {"a": HALVES})


def test_a_tensor_too_few_or_too_many_is_named() -> None:
    fine = torch.zeros(2, 3).half()
    check({"a": fine}, {"a": HALVES})
    with pytest.raises(ValueError, match=r"lacks 'b' \(float16 \[2, 3\]\): calibrate again"):
        check({"a": fine}, {"a": HALVES, "b": HALVES})
    with pytest.raises(ValueError, match="holds 'b', which the method does not know"):
        check({"a": fine, "b": fine}, {"a": HALVES})


@pytest.mark.parametrize("spec", ["kvquant-2bit-1%", "tc-2bit", "tc-cl-2bit", "oscar-2bit", "kvtc-2bit"])
def test_what_was_made_in_python_is_checked_as_a_file_is(spec: str) -> None:
    model = tiny("llama")
    made = calibration(model, spec)
    assert made is not None
    name = next(iter(made.tensors))
    flat = replace(made, tensors={**made.tensors, name: made.tensors[name][..., None]})
    KVCache(model, spec, calibration=made)
    # The same bytes in another shape are another calibration.
    assert flat != made
    with pytest.raises(ValueError, match=f"'{name}' of the calibration is"):
        KVCache(model, spec, calibration=flat)
    with pytest.raises(ValueError, match="needs a calibration"):
        parse_method(spec).codecs(attach(model).view.compressed)


@pytest.mark.parametrize("steps", [201, -201, 32767])
def test_scales_that_no_fp32_number_is_near_to_are_refused(steps: int) -> None:
    model = tiny("llama")
    made = calibration(model, "tc-2bit")
    assert made is not None
    usual = made.tensors["3.usual"].clone()
    usual[1] = steps
    wrong = replace(made, tensors={**made.tensors, "3.usual": usual})
    with pytest.raises(ValueError, match=rf"'3\.usual' of the calibration holds .*{steps}"):
        KVCache(model, "tc-2bit", calibration=wrong)


def test_sixteen_bits_take_no_calibration() -> None:
    model = tiny("llama")
    made = calibration(model, "kvquant-2bit")
    assert made is not None
    with pytest.raises(ValueError, match="which the method does not know"):
        KVCache(model, "kvquant-16bit", calibration=replace(made, method="kvquant-16bit"))


@pytest.mark.parametrize("fact", ["method", "model", "text", "version"])
@pytest.mark.parametrize("value", ["", "1" * 401, None])
def test_facts_are_short_texts(fact: str, value: Any) -> None:
    facts: dict[str, Any] = {"method": "m", "model": "0", "text": "t", "version": "1.0"}
    Calibration({}, **facts)
    with pytest.raises(ValueError, match=f"'{fact}' of a calibration is a text of 1 to 400"):
        Calibration({}, **{**facts, fact: value})
    with pytest.raises(ValueError, match="'one' is no version"):
        Calibration({}, **{**facts, "version": "one"})


def test_a_text_of_a_long_name_can_be_calibrated_on() -> None:
    made = calibrate_on(tiny("llama"), prompt(2, 40), "tc-2bit", name="n" * 5000)
    assert made.text.startswith("n" * 200 + ", sha256")


def test_statistics_that_fp16_does_not_hold_saturate() -> None:
    model = tiny("llama")
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        attention.k_proj.weight *= 1e5
        attention.q_proj.weight *= 1e-5  # the same scores, so gradients are not 0
    found = calibrate_on(model, prompt(2, 40), "kvquant-2bit").layer(0)
    assert bool(found["key.range"].isfinite().all())
    assert float(found["key.range"].max()) == 65504


def test_statistics_that_no_cache_could_use_are_told_of_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "xquant.calibrators.transform.best_basis",
        lambda covariance, metric, count: (
            torch.full((count, len(metric)), 1e6),
            torch.zeros(len(metric), count),
        ),
    )
    with pytest.raises(ValueError, match=r"'0\.analysis' .* holds NaN or infinity: give"):
        run.calibrate_on(tiny("llama"), prompt(2, 40), "tc-2bit")

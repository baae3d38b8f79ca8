"""What errors in tokens cost, and the classes that follow from it."""

import pytest
import torch

from support.models import prompt, tiny
from xquant import attach, parse_method
from xquant.calibrators.collect import collect
from xquant.calibrators.costs import direction
from xquant.calibrators.run import calibrate_on
from xquant.calibrators.spectra import by_class, spectrum
from xquant.calibrators.transform import TransformCalibrator


def test_the_direction_that_costs_depend_on_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(8, 8, generator=generator)
    rows = torch.randn(40, 128, 8, generator=generator) @ mixed + 3
    wanted = torch.linalg.solve(mixed, 0.5 * torch.randn(8, generator=generator))
    chance = torch.randn(40, 128, generator=generator).square()
    fading = torch.linspace(2, 0.1, 128)  # later tokens of a sample are read by fewer
    found = direction(rows, (rows @ wanted).exp() * chance * fading)
    own, planted = ((rows.flatten(0, 1) @ each) for each in (found, wanted))
    assert torch.corrcoef(torch.stack([own, planted]))[0, 1] > 0.98
    assert 0.7 < own.std() / planted.std() < 1.1  # the ridge takes off a little


def test_classes_that_cost_the_same_are_as_all_tokens_are() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(8, 256, 6, generator=generator) * torch.tensor([8.0, 4, 2, 1, 0.5, 0.25])
    order = 9 * torch.randn(8, 256, generator=generator)
    whole, even = spectrum(states), torch.ones(8, 256)
    found = by_class(states, order, even, 2)
    for own in found["profile"].split(6):
        torch.testing.assert_close(own, whole["profile"], rtol=0.15, atol=0)
    costly = 1 + 8.0 * (order > order.median())
    first, second = by_class(states, order, costly, 2)["profile"].split(6)
    assert 5 < float((first / second).mean()) < 12


@pytest.mark.parametrize("spec", ["tc-2bit:classes=2", "tc-cl-2bit:classes=4"])
def test_the_costlier_class_gets_more_bits(spec: str) -> None:
    model = tiny("llama")
    method, samples = parse_method(spec), prompt(8, 128)
    found = calibrate_on(model, samples, method)
    views = attach(model).view.compressed
    every = []
    for codec in method.codecs(views, found):
        (segment,) = codec.segments
        every.append([sum(w.bits * n for w, n in part.runs) for part in segment.quantizer.parts])
        assert every[-1] == sorted(every[-1], reverse=True)
    first, *_, last = map(sum, zip(*every, strict=True))
    assert first > last


@pytest.mark.parametrize(
    "spec", ["tc-2bit", "tc-2bit:classes=2", "tc-2bit:basis=keys-first", "tc-cl-2bit:basis=head"]
)
def test_what_is_predicted_to_cost_more_does(spec: str) -> None:
    model = tiny("llama")
    method = parse_method(spec)
    calibrator = TransformCalibrator(method, attach(model).view.compressed)
    for _ in calibrator.stages(8, 128):
        with torch.enable_grad():
            collect(model, prompt(8, 128), [(calibrator.codecs, calibrator.stage)], lambda: None)
    found = calibrator.tensors()
    for layer in range(len(calibrator.codecs)):
        gradients, rows = calibrator.stage.gradients_of(layer), calibrator.stage.rows(layer)
        assert gradients.shape == rows.shape
        due = (gradients @ found[f"{layer}.synthesis"].float()).square().mean(-1)
        order = rows @ found[f"{layer}.costs"]
        high = order > order.median()
        assert due[:, 4:][high[:, 4:]].mean() > 1.2 * due[:, 4:][~high[:, 4:]].mean()

"""The pieces of a calibration against small independent computations."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from support.examples import examples
from support.models import prompt, tiny
from xquant import attach, parse_method
from xquant.calibrators.calibrator import Rows
from xquant.calibrators.collect import collect
from xquant.calibrators.extremes import Extremes
from xquant.calibrators.find import find_calibrator
from xquant.calibrators.levels import Histogram, best_levels, fit_ranges
from xquant.calibrators.run import calibrate_on
from xquant.quant.codebook import inner_range, nearest


def best_error(x: torch.Tensor, weight: torch.Tensor, levels: int) -> float:
    """Least weighted squared error of any ``levels`` levels: all cuts of the sorted elements."""
    x, order = x.sort()
    weight = weight[order]
    best = torch.inf
    for cuts in combinations(range(1, len(x)), levels - 1):
        total = 0.0
        for part, w in zip(x.tensor_split(list(cuts)), weight.tensor_split(list(cuts)), strict=True):
            mean = (part * w).sum() / w.sum()
            total += float((w * (part - mean) ** 2).sum())
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bits", [1, 2])
def test_levels_are_the_best_there_are(bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(12, generator=generator, dtype=torch.float64) * 2 - 1
    weight = torch.rand(12, generator=generator, dtype=torch.float64) ** 4 + 1e-3
    histogram = Histogram()
    histogram.see(x[:5, None], weight[:5, None])
    histogram.see(x[5:, None], weight[5:, None])
    levels = best_levels(histogram.points(), histogram.weight, bits).double()
    error = float((weight * (x[:, None] - levels).abs().amin(1) ** 2).sum())
    assert error <= best_error(x, weight, 2**bits) * 1.001 + 1e-6


@pytest.mark.parametrize("elements", [[], [0.5], [0.1, 0.5, 0.9], [0.5, 0.5, 0.5, 0.5, 0.5]])
def test_each_of_few_elements_is_a_level(elements: list[float]) -> None:
    x = torch.tensor(elements).view(1, -1)
    histogram = Histogram(len(elements))
    histogram.see(x, torch.ones_like(x))
    levels = best_levels(histogram.points(), histogram.weight, 2)
    assert levels.shape == (4,)
    assert torch.equal(levels, levels.sort().values) and levels.abs().max() <= 1
    torch.testing.assert_close((x - levels[:, None]).abs().min(0).values, torch.zeros(len(elements)))


def test_many_channels_give_the_levels_of_all_their_elements() -> None:
    x = torch.randn(4000, 40, generator=torch.Generator().manual_seed(0)) / 3
    weight = torch.rand(4000, 40, generator=torch.Generator().manual_seed(1))
    side_by_side, together = Histogram(40), Histogram()
    side_by_side.see(x, weight)
    together.see(x.reshape(-1, 1), weight.reshape(-1, 1))
    one, other = (best_levels(h.points(), h.weight, 3) for h in (side_by_side, together))
    torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_fitted_ranges_find_a_stretch_and_shift_and_never_do_worse() -> None:
    levels = torch.tensor([-0.9, -0.2, 0.3, 1.0])
    generator = torch.Generator().manual_seed(0)
    level = levels[torch.randint(4, (300, 3), generator=generator)]
    stretch, shift = torch.tensor([0.8, 1.0, 0.9]), torch.tensor([0.05, 0.0, -0.08])
    x = stretch * level + shift
    histogram = Histogram(4)
    lonely = torch.full((300, 1), 0.25)  # a channel that says nothing of its range
    weight = torch.rand(300, 4, generator=generator)
    histogram.see(torch.cat([x, lonely], 1), weight)
    found = fit_ranges(histogram.points(), histogram.weight, levels)
    torch.testing.assert_close(found[0].float(), torch.cat([stretch, torch.ones(1)]), atol=2e-3, rtol=0)
    torch.testing.assert_close(found[1].float(), torch.cat([shift, torch.zeros(1)]), atol=2e-3, rtol=0)
    noisy = Histogram(1)
    x = torch.randn(2000, 1, generator=generator).clamp(-3, 3) / 3
    noisy.see(x, torch.ones_like(x))
    a, b = (t.float() for t in fit_ranges(noisy.points(), noisy.weight, levels))

    def error(a: Any, b: Any) -> float:
        return float(((a * levels[nearest((x - b) / a, levels).int()] + b - x) ** 2).sum())

    assert error(a, b) < error(torch.ones(1), torch.zeros(1))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.1]), st.integers(1, 40))
def test_extremes_of_parts_are_those_of_the_whole(seed: int, share: float, step: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(90, 3, generator=generator)
    extremes = Extremes(share, 90)
    for part in rows.split(step):
        extremes.see(part)
    low, high = extremes.bounds()
    count = max(1, round(share * 90)) if share else 0
    below, above = (rows < low).sum(0), (rows > high).sum(0)
    assert (below + above == count).all() and ((below - above).abs() <= 1).all()
    whole = inner_range(rows, 0, count)
    assert torch.equal(low, whole[0][0]) and torch.equal(high, whole[1][0])


def test_too_few_elements_for_the_outliers_are_told() -> None:
    extremes = Extremes(0.1, 100)
    extremes.see(torch.randn(5, 2))
    with pytest.raises(ValueError, match="too short for its outliers"):
        extremes.bounds()


class Keep:
    gradients, queries = True, False

    def __init__(self) -> None:
        self.rows: dict[int, Rows] = {}

    def see(self, position: int, rows: Rows) -> None:
        self.rows[position] = rows


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_gradients_are_those_of_the_projections(family: str) -> None:
    """Without a key norm, a key before RoPE is its projection's output, and a value always is."""
    model, ids = tiny(family), prompt(1, 30)
    views = attach(model).view.compressed
    outputs: dict[Any, torch.Tensor] = {}

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs[module] = output

    handles = [
        module.register_forward_hook(keep)
        for view in views
        for module in (view.key_module, view.value_module)
    ]
    logits = model(ids).logits[0, :-1]
    F.cross_entropy(logits, ids[0, 1:]).backward()
    for handle in handles:
        handle.remove()
    method = parse_method("kvquant-2bit")
    stage = Keep()
    collect(model, ids, [(find_calibrator(method, views).codecs, stage)], lambda: None)
    for position, view in enumerate(views):
        rows = stage.rows[position]
        key, value = outputs[view.key_module], outputs[view.value_module]
        torch.testing.assert_close(rows.key, key[0].detach())
        torch.testing.assert_close(rows.value, value[0].detach())
        assert key.grad is not None and value.grad is not None
        torch.testing.assert_close(rows.key_gradient, key.grad[0], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(rows.value_gradient, value.grad[0], rtol=1e-3, atol=1e-6)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "gemma3"])
def test_gradients_predict_how_the_loss_moves(family: str) -> None:
    """Where keys are not a projection's output: a small step of a token's values moves it."""
    model, ids = tiny(family).double(), prompt(1, 30)
    views = attach(model).view.compressed
    stage = Keep()
    codecs = find_calibrator(parse_method("kvquant-2bit"), views).codecs
    collect(model, ids, [(codecs, stage)], lambda: None)

    view = views[-1]

    def loss(nudge: torch.Tensor) -> float:
        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            where = view.value_channels
            return torch.cat(
                [output[..., : where.start], output[..., where] + nudge, output[..., where.stop :]],
                -1,
            )

        handle = view.value_module.register_forward_hook(hook)
        with torch.no_grad():
            found = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
        handle.remove()
        return float(found)

    gradient = stage.rows[len(views) - 1].value_gradient
    assert gradient is not None
    nudge = torch.zeros_like(gradient)
    nudge[7] = torch.randn(gradient.shape[1], generator=torch.Generator().manual_seed(1)) * 0.02
    moved = loss(nudge) - loss(-nudge)
    assert moved == pytest.approx(2 * float((gradient * nudge).sum()), rel=0.05, abs=1e-5)


def keys_of(model: Any, ids: torch.Tensor, position: int) -> torch.Tensor:
    """Keys before RoPE of a layer without key norm, ``[N, T, G*D]``."""
    module = attach(model).view.compressed[position].key_module
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda m, a, output: kept.append(output.detach()))
    with torch.no_grad():
        for sample in ids:
            model(sample[None])
    handle.remove()
    return torch.cat(kept)


def test_key_ranges_leave_the_asked_share_of_every_channel_outside_and_sinks_apart() -> None:
    model, ids = tiny("llama"), prompt(3, 50)
    found = calibrate_on(model, ids, "kvquant-2bit-5%:sink=2,scales=offline")
    keys = keys_of(model, ids, 1)[:, 2:].flatten(0, 1)
    held = found.layer(1)
    low, high = held["key.threshold"].float()
    assert torch.equal(held["key.range"], held["key.threshold"])
    near = 1e-3 * keys.abs().amax()
    outside = ((keys < low - near) | (keys > high + near)).sum(0)
    assert (outside <= round(0.05 * len(keys))).all()
    assert outside.float().mean() > 0.04 * len(keys)
    assert held["key.levels"].shape == held["value.levels"].shape == (4,)
    assert all(t.dtype == torch.float16 for t in held.values())


def test_one_threshold_serves_a_whole_matrix() -> None:
    model, ids = tiny("llama"), prompt(3, 50)
    held = calibrate_on(model, ids, "kvquant-2bit-5%:per=matrix,scales=offline").layer(2)
    keys = keys_of(model, ids, 2)[:, 1:].flatten(0, 1)
    low, high = held["key.threshold"]
    outside = ((keys < low) | (keys > high)).float().mean()
    assert float(outside) == pytest.approx(0.05, abs=0.005)
    assert (held["key.range"] >= low).all() and (held["key.range"] <= high).all()
    assert held["key.threshold"].shape == held["value.threshold"].shape == (2, 1)


def test_weights_decide_where_levels_go() -> None:
    model, ids = tiny("llama"), prompt(3, 50)
    levels = {
        weighting: calibrate_on(model, ids, f"kvquant-2bit-1%:weighting={weighting}").layer(0)
        for weighting in ("kvquant", "fisher", "none")
    }
    first = [found["key.levels"] for found in levels.values()]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    ranges = [found["key.threshold"] for found in levels.values()]
    assert torch.equal(ranges[0], ranges[1]) and torch.equal(ranges[1], ranges[2])


def test_a_calibration_repeats() -> None:
    model, ids = tiny("llama"), prompt(3, 50)
    one, two = (calibrate_on(model, ids, "kvquant-3bit-1%") for _ in range(2))
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(t, two.tensors[name]) for name, t in one.tensors.items())

"""What transform coding is calibrated with, against small independent computations."""

import pytest
import torch

from support.models import prompt, tiny
from xquant import attach, parse_method
from xquant.calibrators.bases import (
    METRIC_RIDGE,
    SINK_SHARE,
    best_basis,
    predict,
    products,
    root_of,
    same_head,
)
from xquant.calibrators.collect import collect
from xquant.calibrators.run import calibrate_on
from xquant.calibrators.spectra import SINKS, blocks
from xquant.calibrators.transform import StatisticsStage, TransformCalibrator


def covariance(seed: int, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, size, generator=generator, dtype=torch.float64)
    return x.T @ x / 50


@pytest.mark.parametrize("seed", range(4))
def test_in_the_basis_states_are_uncorrelated_and_errors_cost_alike(seed: int) -> None:
    states, metric = covariance(seed), covariance(seed + 100)
    analysis, synthesis = (t.double() for t in best_basis(states, root_of(metric), 6))
    torch.testing.assert_close(analysis @ synthesis, torch.eye(6).double(), atol=1e-5, rtol=0)
    spread = analysis @ states @ analysis.T
    torch.testing.assert_close(spread, spread.diagonal().diag(), atol=1e-5, rtol=1e-5)
    assert bool((spread.diagonal().diff() <= 1e-6).all()), "largest first"
    ridged = metric + METRIC_RIDGE * metric.diagonal().mean() * torch.eye(6)
    costs = synthesis.T @ ridged @ synthesis
    torch.testing.assert_close(costs, torch.eye(6).double(), atol=1e-5, rtol=0)


def test_states_of_low_rank_need_no_more_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    analysis, synthesis = best_basis(low @ low.T, root_of(covariance(1)), 3)
    y = torch.randn(10, 3, generator=generator) @ low.float().T
    torch.testing.assert_close(y @ analysis.T @ synthesis.T, y, atol=1e-4, rtol=1e-3)


def test_a_prediction_finds_a_linear_relation() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 104, 4, generator=generator) * 3 + 1
    matrix, constant = torch.randn(5, 4, generator=generator), torch.arange(5.0)
    predictor, mean = predict(x, x @ matrix.T + constant)
    torch.testing.assert_close(predictor, matrix, atol=0.01, rtol=0.01)
    torch.testing.assert_close(x @ predictor.T + mean, x @ matrix.T + constant, atol=0.1, rtol=0.02)


def test_what_samples_begin_with_counts_a_little() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 50, 4, generator=generator), torch.randn(3, 50, 2, generator=generator)
    first = [row.outer(other) for row, other in zip(x[:, 0], y[:, 0], strict=True)]
    rows = zip(x[:, SINKS:].flatten(0, 1), y[:, SINKS:].flatten(0, 1), strict=True)
    others = [row.outer(other) for row, other in rows]
    expected = torch.stack(others).mean(0) + SINK_SHARE * torch.stack(first).mean(0)
    torch.testing.assert_close(products(x, y).float(), expected)


def test_blocks_leave_out_sinks_and_the_rest() -> None:
    parts, sinks = blocks(torch.arange(2 * 300.0).view(2, 300, 1))
    assert parts.shape == (4, 128, 1) and sinks.sum(1).tolist() == [SINKS, 0, SINKS, 0]
    assert torch.equal(parts[1, :, 0], torch.arange(128.0, 256.0))


def test_heads_apart_do_not_mix() -> None:
    model = tiny("llama")
    view = attach(model).view.compressed[0]
    found = calibrate_on(model, prompt(2, 40), "tc-2bit:basis=head").layer(0)
    apart = 1 - same_head(view)
    mixed = (found["synthesis"].double() @ found["analysis"].double()) * apart
    assert mixed.abs().max() < 0.02
    for channel in found["analysis"]:
        of_head = channel.double().abs() @ same_head(view)[:, :: view.head_size][:, : view.kv_heads]
        assert of_head.min() < 1e-3 * of_head.max()


def test_keys_that_come_first_need_channels_of_their_own_alone() -> None:
    model = tiny("llama")
    view = attach(model).view.compressed[0]
    found = calibrate_on(model, prompt(2, 200), "tc-2bit:basis=keys-first").layer(0)
    width, exact = view.kv_width, {name: each.double() for name, each in found.items()}
    analysis, synthesis = exact["analysis"], exact["synthesis"]
    assert not synthesis[:width, width:].any() and not analysis[:width, width:].any()
    rows = torch.randn(50, view.state_width, dtype=torch.float64)
    channels = rows @ analysis.T
    channels[:, width:] -= channels[:, :width] @ exact["from_keys"].T
    torch.testing.assert_close(channels @ synthesis.T, rows, atol=0.05, rtol=0)


def test_keys_do_not_come_first_where_they_tell_all() -> None:
    """Of as many key heads as query heads: keys and values are one state X, and have its channels."""
    view = attach(tiny("llama-mha")).view.compressed[0]
    found = parse_method("tc-2bit:basis=keys-first").expected([view])
    assert "0.from_keys" not in found and found["0.analysis"].shape[0] == view.hidden


@pytest.mark.parametrize("different", [10, 40, 131])
def test_few_tokens_are_not_learned_by_heart(different: int) -> None:
    """Of a token's embedding no more numbers are kept than half as many as there were tokens."""
    model = tiny("llama")
    ids = torch.arange(4 * 64).view(4, 64) % different
    embedding = calibrate_on(model, ids, "tc-cl-2bit").tensors["embedding"]
    kept = (embedding != 0).any(0)
    assert kept.sum() == min(different // 2, model.config.hidden_size)
    assert kept[: int(kept.sum())].all()


def test_samples_of_no_block_are_refused() -> None:
    with pytest.raises(ValueError, match="fill no block"):
        calibrate_on(tiny("llama"), prompt(2, 15), "tc-2bit")


def test_gradients_are_of_the_first_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of all tokens."""
    model = tiny("llama")
    texts = prompt(3, 64)

    def statistics(samples: torch.Tensor) -> StatisticsStage:
        views = attach(model).view.compressed
        found = TransformCalibrator(parse_method("tc-2bit"), views)
        collect(model, samples, [(found.codecs, found.stage)], lambda: None)
        return found.stage

    whole = statistics(texts)
    monkeypatch.setattr("xquant.calibrators.transform.GRADIENT_TOKENS", 100)
    found, of_two = statistics(texts), statistics(texts[:2])
    for layer in range(5):
        assert torch.equal(found.rows(layer), whole.rows(layer))
        assert torch.equal(found.metric(layer), of_two.metric(layer))
        assert not torch.equal(found.metric(layer), whole.metric(layer))

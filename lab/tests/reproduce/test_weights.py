"""Weights in levels and a sparse part, against small independent computations."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from support.models import prompt, tiny
from xquant_lab.reproduce.weights import (
    channel_levels,
    collect_weights,
    linear_weights,
    quantize_matrix,
    quantize_weights,
    sparse_part,
    weight_bits,
    with_weights,
)


@pytest.fixture(scope="module")
def matrix() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and how much the loss depends on its elements."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 500, generator=generator)
    return weight, torch.randn(20, 500, generator=generator).pow(4)


def weighted_error(weight: torch.Tensor, fisher: torch.Tensor, found: torch.Tensor) -> float:
    return float((fisher * (weight - found.float()).square()).sum())


@pytest.mark.parametrize("bits", [3, 4])
def test_a_channel_has_so_many_levels_beside_what_is_sparse(matrix, bits):
    weight, fisher = matrix
    found, sparse = quantize_matrix(weight, fisher, bits), sparse_part(weight, fisher)
    assert int(sparse.sum()) == 5 + 40  # 0.05% and 0.4% of 10,000
    assert torch.equal(found[sparse], weight[sparse].half())
    for row, kept in zip(found, sparse, strict=True):
        assert len(row[~kept].unique()) == 2**bits


def test_the_sparse_part_is_the_most_sensitive_and_then_the_largest():
    weight, fisher = torch.zeros(10, 1000), torch.zeros(10, 1000)
    fisher[3, :5], fisher[3, 5] = 9, 1
    weight[3, :5], weight[7, :40], weight[8, :10] = -9, -5, 1
    wanted = torch.zeros(10, 1000, dtype=torch.bool)
    wanted[3, :5] = wanted[7, :40] = True
    assert torch.equal(sparse_part(weight, fisher), wanted)


def test_an_element_takes_the_nearest_level(matrix):
    weight, fisher = matrix
    found, sparse = quantize_matrix(weight, fisher, 3), sparse_part(weight, fisher)
    for row, own, kept in zip(weight, found, sparse, strict=True):
        levels = own[~kept].unique().float()
        nearest = (row[~kept, None] - levels).abs().argmin(1)
        assert torch.equal(levels[nearest], own[~kept].float())


def test_fewer_bits_are_a_larger_error(matrix):
    weight, fisher = matrix
    errors = [weighted_error(weight, fisher, quantize_matrix(weight, fisher, b)) for b in (4, 3, 2)]
    assert errors[0] < 0.5 * errors[1] < 0.25 * errors[2]


def test_levels_are_where_elements_are_sensitive():
    points = np.linspace(-1, 1, 400)
    sensitive = np.abs(points - 0.5) < 0.1
    levels = channel_levels(points, np.where(sensitive, 1, 1e-9), 3)
    assert ((levels > 0.4) & (levels < 0.6)).sum() == 8


def test_levels_where_there_is_little_to_tell_them_by():
    few = np.array([3.0, 1.0, 3.0, 2.0])
    assert channel_levels(few, np.ones(4), 2).tolist() == [1, 2, 3, 3]
    assert channel_levels(few[:0], np.ones(0), 2).tolist() == [0, 0, 0, 0]
    points = np.linspace(-1, 1, 40)
    alike = channel_levels(points, np.ones(40), 2)
    assert np.array_equal(channel_levels(points, np.zeros(40), 2), alike)
    assert np.array_equal(channel_levels(points, (points > 0.85).astype(float), 2), alike)


def test_bits_count_codes_levels_and_the_sparse_part():
    layers = [torch.empty(4096, 4096, device="meta"), torch.empty(11008, 4096, device="meta")]
    rows, elements = 4096 + 11008, 4096 * (4096 + 11008)
    sparse = sum(round(0.0005 * w.numel()) + round(0.004 * w.numel()) for w in layers)
    bits = 3 * elements + rows * 8 * 16 + sparse * 32 + (rows + 2) * 32
    assert weight_bits(layers, 3) == bits / elements == pytest.approx(3.18, abs=0.01)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_linear_layers_of_the_decoder_are_meant(family):
    model = tiny(family)
    found = linear_weights(model)
    own = dict(model.named_parameters())
    assert all(own[name] is weight for name, weight in found.items())
    assert {name.split(".")[1] for name in found} == {"layers"}
    assert len(found) == 5 * (7 if family == "llama" else 4)


def test_weights_without_a_floating_point_are_refused():
    model = tiny("llama")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="no linear layers in floating point"):
        linear_weights(model)


@pytest.mark.long
def test_a_copy_has_the_weights_and_the_model_its_own():
    model = tiny("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    ids, weights = prompt(), linear_weights(model)
    fisher = {name: torch.ones_like(weight) for name, weight in weights.items()}
    made = quantize_weights(weights, fisher, 3, lambda: None)
    other = with_weights(model, made)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        copied = dict(other.named_parameters())[name]
        assert torch.equal(copied, made[name].float() if name in made else parameter)
        assert (name in made) != torch.equal(copied, parameter)
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, other(ids).logits)


def test_gradients_of_weights_are_squared_sample_by_sample():
    model, samples = tiny("llama"), prompt(3, 20)
    model.lm_head.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    weights, seen = linear_weights(model), []
    with torch.inference_mode():
        found = collect_weights(model, samples.clone(), weights, lambda: seen.append(1))
    assert len(seen) == 3
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
    name = "model.layers.2.mlp.up_proj.weight"
    total = torch.zeros_like(weights[name])
    for sample in samples:
        model.zero_grad()
        F.cross_entropy(model(sample[None]).logits[0, :-1], sample[1:]).backward()
        total += weights[name].grad.square() / 3
    torch.testing.assert_close(found[name], total)
    assert found.keys() == weights.keys()

"""OSCAR's calibrator against small independent computations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import prompt, tiny
from xquant import attach, parse_method
from xquant.calibrators.calibrator import Rows
from xquant.calibrators.collect import collect
from xquant.calibrators.find import find_calibrator
from xquant.calibrators.run import calibrate_on, calibrate_together
from xquant.methods.oscar import bit_reversed
from xquant.quant import hadamard


class Keep:
    gradients = False
    queries = True

    def __init__(self) -> None:
        self.rows: dict[int, Rows] = {}

    def see(self, position: int, rows: Rows) -> None:
        self.rows[position] = rows


def rows_of(model: Any, ids: Tensor) -> dict[int, Rows]:
    views, stage = attach(model).view.compressed, Keep()
    codecs = find_calibrator(parse_method("oscar-2bit"), views).codecs
    collect(model, ids, [(codecs, stage)], lambda: None)
    return stage.rows


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *(("llama", "sdpa"), ("llama", "eager"), ("llama-mha", "sdpa"), ("qwen3", "sdpa")),
        *(("gemma2", "eager"), ("phi3", "sdpa")),
    ],
)
def test_queries_are_those_that_give_the_models_attention(family: str, implementation: str) -> None:
    model, ids = tiny(family), prompt(1, 20)
    model.set_attn_implementation("eager")
    wanted = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    rows = rows_of(model, ids)
    for position, view in enumerate(attach(model).view.compressed):
        seen, attention = rows[position], wanted[view.index][0]
        assert seen.query is not None
        query = seen.query.unflatten(-1, (-1, view.head_size)).transpose(0, 1)
        key = view.by_head((seen.key, seen.value))[0].transpose(0, 1)
        scores = query @ key.repeat_interleave(len(query) // len(key), 0).mT * view.module.scaling
        softcap = getattr(model.config, "attn_logit_softcapping", None)
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        closed = torch.ones(20, 20, dtype=torch.bool).triu(1)
        found = scores.masked_fill(closed, -torch.inf).softmax(-1)
        torch.testing.assert_close(found, attention, rtol=1e-3, atol=1e-4)


def eigenvectors(turn: Tensor) -> Tensor:
    """Those that `spread` mixed, in the order of rising eigenvalues."""
    mixed = turn[bit_reversed(len(turn))].flip(0).T
    return (mixed @ hadamard(len(turn)).T).double()


@pytest.mark.parametrize("matrix", ["head", "layer"])
def test_matrices_are_of_the_covariances(matrix: str) -> None:
    model, ids = tiny("llama"), prompt(3, 40)
    samples = [rows_of(model, one[None]) for one in ids]
    found = calibrate_on(model, ids, f"oscar-2bit:matrix={matrix}")
    for position, view in enumerate(attach(model).view.compressed):
        every = [rows[position] for rows in samples]
        query, key, value = (
            torch.cat([getattr(rows, name) for rows in every]).unflatten(-1, (-1, 12)).double()
            for name in ("query", "key", "value")
        )
        covariances = []
        for head in range(view.kv_heads):
            met = query[:, 2 * head : 2 * head + 2].flatten(0, 1)
            weight = (key[:, head] @ met.T).square().sum(1)
            of_head = value[:, head]
            weighted = torch.einsum("t,ti,tj->ij", weight / weight.sum(), of_head, of_head)
            covariances.append({"key": met.T @ met, "value": weighted})
        for name in ("key", "value"):
            turns = found.layer(position)[f"{name}.turn"]
            wanted = torch.stack([each[name] for each in covariances])
            if matrix == "layer":
                turns, wanted = turns[None], wanted.mean(0, keepdim=True)
            for turn, covariance in zip(turns, wanted, strict=True):
                vectors = eigenvectors(turn)
                spectrum = vectors.T @ covariance @ vectors / covariance.diagonal().sum()
                own = torch.linalg.eigvalsh(covariance) / covariance.diagonal().sum()
                torch.testing.assert_close(spectrum, own.diag(), rtol=1e-3, atol=1e-5)


def test_it_is_calibrated_together_with_a_method_that_needs_gradients() -> None:
    model, ids = tiny("llama"), prompt(2, 40)
    methods = [parse_method(spec) for spec in ("tc-2bit", "oscar-2bit", "kvquant-2bit")]
    together = calibrate_together(model, ids, methods)
    for method, made in zip(methods, together, strict=True):
        alone = calibrate_on(model, ids, method)
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(made.tensors[name], tensor, rtol=1e-3, atol=1e-3)


def test_queries_that_cannot_be_seen_are_told_of() -> None:
    with pytest.raises(ValueError, match="the queries of DeepseekV3ForCausalLM cannot be seen"):
        calibrate_on(tiny("deepseek_v3"), prompt(2, 20), "oscar-2bit")

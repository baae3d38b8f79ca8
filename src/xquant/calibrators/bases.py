"""Bases in which bits are worth most, and predictions, from covariances of states and metrics of errors.

Letters are those of `transform`. Decompositions and products are in fp64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models import AttentionView
from ..threads import one_thread
from .spectra import SINKS, spectrum

METRIC_RIDGE = 0.02
"""A metric gets so much times the mean of its diagonal added to its diagonal, so that it can be inverted."""
LEAST_RIDGE = 1e-6
"""And at least so much, where the mean of all layers' diagonals is 1."""
PREDICTION_RIDGE = 1e-3
"""The covariance of the rows that are predicted from gets so much times the mean of its diagonal."""
LEAST_SQUARE = 1e-4
"""That mean is taken to be at least so much: of smaller rows the predictor would not fit into fp16."""
SINK_SHARE = 0.003
"""How much the tokens that begin samples count, all others together being 1. They are sinks, and a sink
can stand in the middle of a text, too: the token between two documents. Its row is far from all others,
in channels that these do not use. A larger share turns the basis away from all others (docs/log.md)."""


def same_head(view: AttentionView) -> Tensor:
    """1 where two numbers of a row belong to the same head, else 0: ``[W, W]``."""
    heads = torch.arange(view.kv_heads, device="cpu")
    head = torch.cat([heads.repeat_interleave(size) for size in (view.head_size, view.value_size)])
    return (head[:, None] == head).double()


def mean_of(states: Tensor) -> Tensor:
    """The mean row of states ``[N, T, W]`` but sinks."""
    return states[:, SINKS:].flatten(0, 1).mean(0)


def products(x: Tensor, y: Tensor) -> Tensor:
    """The mean product of rows of states ``[N, T, W]`` and ``[N, T, W']``, fp64 ``[W, W']``: of all tokens
    but sinks, and by `SINK_SHARE` of those that begin the samples."""
    inner = x[:, SINKS:].flatten(0, 1).double()
    other = inner if y is x else y[:, SINKS:].flatten(0, 1).double()
    first = x[:, 0].double().T @ y[:, 0].double()
    return inner.T @ other / len(inner) + SINK_SHARE / len(x) * first


def predict(below: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The linear map ``[W, W']`` and the constant ``[W]`` that predict ``rows`` ``[N, T, W]`` best from
    ``below`` ``[N, T, W']``."""
    low, high = mean_of(below), mean_of(rows)
    x, y = below - low, rows - high
    covariance = products(x, x)
    usual = covariance.diagonal().mean().clamp(min=LEAST_SQUARE)
    covariance.diagonal().add_(PREDICTION_RIDGE * usual)
    with one_thread():
        predictor = torch.linalg.solve(covariance, products(x, y)).T.half().float()
    return predictor, high - predictor @ low


def ridged(metric: Tensor) -> Tensor:
    """The metric, and a ridge. A layer that nothing reads has a ridge alone."""
    ridge = (METRIC_RIDGE * metric.diagonal().mean()).clamp(min=LEAST_RIDGE)
    return metric + ridge * torch.eye(len(metric), dtype=metric.dtype, device="cpu")


def root_of(metric: Tensor) -> Tensor:
    """``L`` with ``L L^T`` the `ridged` metric."""
    return torch.linalg.cholesky(ridged(metric))


def own_basis(states: Tensor, metric: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of states ``[N, T, W]`` that are coded by themselves, fp32, and the states less their mean.
    ``metric``: `ridged`."""
    mean = mean_of(states)
    centred = states - mean
    root = torch.linalg.cholesky(metric)
    analysis, synthesis = best_basis(products(centred, centred), root, len(metric))
    found = {"mean": mean, "analysis": analysis.half().float(), "synthesis": synthesis}
    return found | spectrum(centred @ found["analysis"].T), centred


@one_thread()
def best_basis(covariance: Tensor, root: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The basis ``[C, W]`` in which states are uncorrelated and an error in any channel costs the same,
    with its inverse ``[W, C]``. Only the ``count`` channels of largest variance are kept.

    With ``root`` the ``L`` of the metric ``F = L L^T`` and ``E`` the eigenvectors of ``L^T C L``: states
    ``E^T L^T y``.
    """
    _, vectors = torch.linalg.eigh(root.T @ covariance @ root)
    vectors = vectors.flip(1)[:, :count]
    synthesis = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    return (root @ vectors).T.float(), synthesis.float()


def dealt_out(counts: Sequence[int]) -> list[Tensor]:
    """Deal the channels of a span, ordered by their variance, out to its layers: which of them each layer
    packs, so many as ``counts`` says. Every layer gets its share of those with the largest variance."""
    layers = torch.arange(len(counts), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    share = torch.cat([(torch.arange(count, device="cpu") + 0.5) / count for count in counts])
    order = layers[share.argsort(stable=True)]
    return [(order == number).nonzero().squeeze(1) for number in range(len(counts))]

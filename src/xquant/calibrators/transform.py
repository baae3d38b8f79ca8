"""Statistics for transform coding: the basis of a layer's keys and values in which bits are worth most.

Letters: ``W`` numbers of a token, its keys before RoPE and its values; ``C`` channels of the basis. Rows of
all layers are kept in fp16 until the end: ``2 W`` bytes a token and layer, 2.7 GB for 20,480 tokens of a
model with 32 layers of ``W = 2,048``.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.choose import packer_of
from ..methods.key_value import KeyValueCodec
from ..methods.transform import Transform
from ..methods.transform_codec import channels
from ..models import AttentionView
from ..quant import Plain
from ..quant.affine import FP16_MAX
from ..quant.ranked import Ranked, allot, side_nbytes, steps_of
from ..quant.trellis import CIRCLE
from ..threads import one_thread
from .calibrator import Rows, Stage

SINKS = 4
"""First tokens of a sample that are left out: their keys and values are far from all others."""
BLOCK = 128
"""Tokens whose variance is taken at a time."""
METRIC_RIDGE = 0.02
"""Times the mean diagonal of the metric, added to its diagonal."""
PREDICTION_RIDGE = 1e-3
"""The same for the covariance of the rows that are predicted from."""
LOOP_BITS = 1.5
"""Bits a value at which a layer is quantized before the layer above learns to predict from it."""


class TransformCalibrator:
    """Finds the tensors of each layer.

    * ``analysis`` ``[C, W]``, ``synthesis`` ``[W, C]`` and ``mean`` ``[W]``: what is packed of a row ``y`` is
      ``analysis @ (y - mean)``;
    * ``usual`` ``[C]``: the usual scale of every channel, see `Ranked`;
    * ``profile`` ``[C]``: the mean variance in a block of the channel of each rank;
    * with prediction, ``predictor`` ``[W, W']``: a row is expected to be ``predictor @ y' + mean``, where
      ``y'`` are the decoded rows of the layers below, the nearest layer first.
    """

    def __init__(self, method: Transform, views: Sequence[AttentionView]) -> None:
        self.method = method
        self.codecs = [KeyValueCodec(v, Plain(v.dtype), Plain(v.dtype), "pre") for v in views]
        self.stage = StatisticsStage(len(views), method.metric == "fisher")

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        if length < CIRCLE:
            raise ValueError(f"samples of {length} tokens fill no block: give {CIRCLE} or more")
        yield self.stage

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        below: list[Tensor] = []
        for number, codec in enumerate(self.codecs):
            rows, metric = self.stage.rows(number), self.stage.metric(number)
            if self.method.basis == "head":
                metric = metric * same_head(codec.view)
            layer = self._layer(codec.view, rows, metric, below)
            if depth := self.method.layers_below:
                below = [as_read(rows, layer, below), *below][:depth]
            found |= {f"{number}.{name}": tensor for name, tensor in layer.items()}
        return found

    def _layer(
        self, view: AttentionView, rows: Tensor, metric: Tensor, below: list[Tensor]
    ) -> dict[str, Tensor]:
        """The tensors of a layer, from its rows ``[N, T, W]`` and the decoded rows of the layers below."""
        found: dict[str, Tensor] = {}
        inner = rows[:, SINKS:].flatten(0, 1)
        mean = inner.mean(0)
        residual = rows
        if below:
            known = torch.cat(below, -1)
            predictor, mean = predict(known[:, SINKS:].flatten(0, 1), inner)
            found["predictor"] = predictor.half()
            residual = rows - known @ predictor.T
        centred = (residual - mean)[:, SINKS:].flatten(0, 1)
        covariance = centred.T.double() @ centred.double() / len(centred)
        if self.method.basis == "head":
            covariance = covariance * same_head(view)
        analysis, synthesis = best_basis(covariance, metric, channels(view))
        found |= {"mean": mean, "analysis": analysis.half(), "synthesis": synthesis.half()}
        states = (residual - mean) @ found["analysis"].float().T
        return found | spectrum(states)


class StatisticsStage:
    """The only pass: keeps all rows, and sums the products of their gradients (the empirical Fisher
    information)."""

    queries = False

    def __init__(self, layers: int, gradients: bool) -> None:
        self.gradients = gradients
        self._rows: list[list[Tensor]] = [[] for _ in range(layers)]
        self._products: list[Tensor] = []

    def see(self, position: int, rows: Rows) -> None:
        states = torch.cat([rows.key, rows.value], -1)
        self._rows[position].append(states.float().clamp(-FP16_MAX, FP16_MAX).half().cpu())
        if rows.key_gradient is None or rows.value_gradient is None:
            return
        gradient = torch.cat([rows.key_gradient, rows.value_gradient], -1)[SINKS:].float()
        product = (gradient.T @ gradient).cpu()
        if len(self._products) <= position:
            self._products.append(product)
        else:
            self._products[position] += product

    def rows(self, position: int) -> Tensor:
        """All rows of a layer, fp32 ``[N, T, W]``."""
        return torch.stack(self._rows[position]).float()

    def metric(self, position: int) -> Tensor:
        """The metric of a layer, ``[W, W]`` in fp64: how much an error in its rows costs. All layers have
        the same unit.

        Raises:
            ValueError: the gradients of all layers are 0.
        """
        if not self.gradients:
            return torch.eye(self._rows[position][0].shape[-1], dtype=torch.float64)
        unit = torch.stack([product.diagonal().mean() for product in self._products]).mean()
        if unit == 0:
            raise ValueError("the calibration text leaves no gradient: give another")
        return self._products[position].double() / unit


def same_head(view: AttentionView) -> Tensor:
    """1 where two numbers of a row belong to the same head, else 0: ``[W, W]``."""
    heads = torch.arange(view.kv_heads)
    head = torch.cat([heads.repeat_interleave(size) for size in (view.head_size, view.value_size)])
    return (head[:, None] == head).double()


def predict(below: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The linear map ``[W, W']`` and the constant ``[W]`` that predict ``rows`` ``[M, W]`` best from
    ``below`` ``[M, W']``."""
    low, high = below.mean(0), rows.mean(0)
    x, y = (below - low).double(), (rows - high).double()
    products = x.T @ x
    products.diagonal().add_(PREDICTION_RIDGE * products.diagonal().mean().clamp(min=1e-30))
    known = x.T @ y
    with one_thread():
        predictor = torch.linalg.solve(products, known).T.half().float()
    return predictor, high - predictor @ low


@one_thread()
def best_basis(covariance: Tensor, metric: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The basis ``[C, W]`` in which states are uncorrelated and an error in any channel costs the same,
    with its inverse ``[W, C]``. Only the ``count`` channels of largest variance are kept.

    With the metric ``F = L L^T`` and ``E`` the eigenvectors of ``L^T C L``: states ``E^T L^T y``.
    """
    ridge = METRIC_RIDGE * metric.diagonal().mean()
    root = torch.linalg.cholesky(metric + ridge * torch.eye(len(metric), dtype=metric.dtype))
    _, vectors = torch.linalg.eigh(root.T @ covariance @ root)
    vectors = vectors.flip(1)[:, :count]
    synthesis = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    return (root @ vectors).T.float(), synthesis.float()


def blocks(states: Tensor) -> tuple[Tensor, Tensor]:
    """States ``[N, T, C]`` cut into blocks ``[M, n, C]``, and which of their tokens are sinks, ``[M, n]``."""
    length = states.shape[1]
    size = min(BLOCK, length // CIRCLE * CIRCLE)
    whole = length // size * size
    sinks = (torch.arange(whole) < SINKS).expand(len(states), -1)
    return states[:, :whole].unflatten(1, (-1, size)).flatten(0, 1), sinks.reshape(-1, size)


def spectrum(states: Tensor) -> dict[str, Tensor]:
    """``usual`` and ``profile`` of states ``[N, T, C]``."""
    parts, sinks = blocks(states)
    variance = torch.stack(
        [part[~hidden].square().mean(0) for part, hidden in zip(parts, sinks, strict=True)]
    )
    return {
        "usual": steps_of(variance.mean(0)).to(torch.int16),
        "profile": variance.sort(-1, descending=True).values.mean(0).float(),
    }


def as_read(rows: Tensor, found: dict[str, Tensor], below: list[Tensor]) -> Tensor:
    """Rows ``[N, T, W]`` of a layer, quantized at `LOOP_BITS` and decoded. Sinks, and tokens that fill no
    block, stay as they are."""
    expected = found["mean"]
    if below:
        expected = expected + torch.cat(below, -1) @ found["predictor"].float().T
    states = (rows - expected) @ found["analysis"].float().T
    parts, sinks = blocks(states)
    size = parts.shape[1]
    budget = int(LOOP_BITS * rows.shape[-1]) - 8 * side_nbytes(states.shape[-1], size) // size
    quantizer = Ranked(found["usual"], allot([found["profile"]], max(budget, 0))[0])
    read, packer = torch.empty_like(parts), packer_of("auto")
    packer.unpack(quantizer, packer.pack(quantizer, parts, sinks), read)
    loss = (parts - read).view(len(rows), -1, states.shape[-1]) @ found["synthesis"].float().T
    out = rows.clone()
    out[:, SINKS : loss.shape[1]] -= loss[:, SINKS:]
    return out

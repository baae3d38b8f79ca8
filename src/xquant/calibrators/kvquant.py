"""KVQuant's statistics (arXiv 2401.18079, sections 3.3 to 3.6).

The first pass finds ranges of keys. The second finds levels of the datatype for elements scaled by those
ranges, and then fits the ranges to the levels. Sinks are left out.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

import torch
from torch import Tensor

from ..methods.key_value import KeyValueCodec
from ..methods.kvquant import KVQuant
from ..models import AttentionView
from ..quant import Codebook, Plain
from ..quant.affine import FP16_MAX
from ..quant.codebook import scale_of
from .calibrator import Rows, Stage
from .extremes import Extremes
from .levels import Histogram, best_levels, fit_ranges

Found = list[dict[str, Tensor]]


class KVQuantCalibrator:
    """Gathers for each layer those of these tensors that the options need (`KVQuant.expected_of`):

    ``key.range`` ``[2, C]``, lowest and highest; ``key.threshold`` ``[2, C]``, or ``[2, 1]`` for whole
    matrices; ``value.threshold`` ``[2, 1]``; ``key.levels`` and ``value.levels`` ``[2**bits]``.
    """

    def __init__(self, method: KVQuant, views: Sequence[AttentionView]) -> None:
        if method.has_levels:
            import_module("sklearn.cluster")  # a missing package is reported before the long work
        self.method = method
        self.found: Found = [{} for _ in views]
        # A quantizer makes the codec take out the bias of keys, as in the cache. Its codes are not used.
        codes = Codebook(1, "token", 0, torch.tensor([-1.0, 1.0], dtype=torch.float32, device="cpu"))
        self.codecs = [KeyValueCodec(v, codes, Plain(v.dtype), method.rope) for v in views]

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        if length <= self.method.sink:
            raise ValueError(f"samples of {length} tokens hold nothing but sinks: give longer ones")
        tokens = samples * (length - self.method.sink)
        if self.method.has_levels and tokens < 2**self.method.bits:
            raise ValueError("the calibration text is too short for a codebook: give more windows")
        if self.method.has_ranges or self.method.has_matrix_thresholds:
            ranges = RangeStage(self.method, self.found, tokens)
            yield ranges
            ranges.finish()
        if self.method.has_levels or self.method.has_fitted_ranges:
            levels = LevelStage(self.method, self.found)
            yield levels
            levels.finish()

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{i}.{k}": t for i, found in enumerate(self.found) for k, t in found.items()}
        return {n: t.clamp(-FP16_MAX, FP16_MAX).half().cpu() for n, t in named.items()}


class RangeStage:
    """The pass that finds ranges and thresholds of key channels, or thresholds of whole matrices."""

    gradients = queries = False

    def __init__(self, method: KVQuant, found: Found, tokens: int) -> None:
        self.method, self.found, self.tokens = method, found, tokens
        share = 0.0 if method.has_matrix_thresholds else method.share
        self.channels = [Extremes(share, tokens) for _ in found]
        self.matrices: list[dict[str, Extremes]] = [{} for _ in found]

    def see(self, position: int, rows: Rows) -> None:
        sink = self.method.sink
        self.channels[position].see(rows.key[sink:])
        if self.method.has_matrix_thresholds:
            for name, all_rows in (("key", rows.key), ("value", rows.value)):
                fresh = Extremes(self.method.share, self.tokens * all_rows.shape[1])
                extremes = self.matrices[position].setdefault(name, fresh)
                extremes.see(all_rows[sink:].reshape(-1, 1))

    def finish(self) -> None:
        for found, channels, matrices in zip(self.found, self.channels, self.matrices, strict=True):
            bounds = channels.bounds()
            for name, extremes in matrices.items():
                found[f"{name}.threshold"] = extremes.bounds()
            if self.method.has_matrix_thresholds:
                lowest, highest = found["key.threshold"]
                bounds = bounds.clamp(lowest, highest)
            elif self.method.outliers:
                found["key.threshold"] = bounds
            if self.method.has_ranges:
                found["key.range"] = bounds


class LevelStage:
    """The pass that finds levels by k-means and fits ranges of key channels by least squares. Both are
    weighted with the diagonal of the Fisher information."""

    queries = False

    def __init__(self, method: KVQuant, found: Found) -> None:
        self.method, self.found = method, found
        self.gradients = method.weighting != "none"
        self.values = [Histogram() for _ in found]
        self.keys: list[Histogram | None] = [None for _ in found]

    def see(self, position: int, rows: Rows) -> None:
        found = {name: tensor.to(rows.key.device) for name, tensor in self.found[position].items()}
        if self.method.has_levels:
            scaled = self._scaled(self.method.values(found), rows.value, rows.value_gradient)
            self.values[position].see(*(t.reshape(-1, 1) for t in scaled))
        quantizer = self.method.keys(found)
        x, weight = self._scaled(quantizer, rows.key, rows.key_gradient)
        fitted = quantizer.span is not None
        keys = self.keys[position] or Histogram(x.shape[-1] if fitted else 1)
        keys.see(*(t.reshape(-1, len(keys.weight)) for t in (x, weight)))
        self.keys[position] = keys

    def _scaled(self, quantizer: Codebook, x: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scaled blocks of ``x``, as a cache would seal them, and the weight of each element: 0 for sinks and
        outliers. Of a sample with whole blocks, the rest is left out."""
        per_block = quantizer.per == "channel" and quantizer.span is None
        block = min(self.method.group, len(x)) if per_block else len(x)
        whole = len(x) // block * block
        sinks = (torch.arange(whole, device=x.device) < self.method.sink).view(-1, block)
        blocks = x[:whole].unflatten(0, (-1, block))
        scaled = quantizer.scaled(blocks, sinks)
        weight = torch.ones_like(scaled.x, dtype=torch.float64)
        if gradient is not None:
            weight = gradient[:whole].view_as(blocks).double().square()
        if self.method.weighting == "kvquant":
            weight = weight * scaled.wide_scale.double().square()
        weight = weight.masked_fill(sinks.unsqueeze(-1), 0)
        if scaled.outliers is not None:
            weight = weight.masked_fill(scaled.outliers, 0)
        return scaled.x, weight

    def finish(self) -> None:
        method = self.method
        for found, keys, values in zip(self.found, self.keys, self.values, strict=True):
            assert keys is not None
            points = keys.points()
            if method.has_levels:
                found["key.levels"] = best_levels(points, keys.weight, method.bits)
                found["value.levels"] = best_levels(values.points(), values.weight, method.bits)
            if method.has_fitted_ranges:
                scale, zero = (t.float().cpu() for t in scale_of(*found["key.range"]))
                levels = method.levels(found.get("key.levels"))
                stretch, shift = (t.float() for t in fit_ranges(points, keys.weight, levels))
                middle, reach = zero + scale * shift, scale * stretch
                found["key.range"] = torch.stack([middle - reach, middle + reach])

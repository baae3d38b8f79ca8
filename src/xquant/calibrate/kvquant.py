"""KVQuant's statistics (arXiv 2401.18079, sections 3.3 to 3.6): ranges of keys first, then the levels of
the datatype among what those ranges hold. Sinks count for neither."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Codebook, Plain
from .calibrator import Rows, Stage
from .extremes import Extremes
from .levels import Histogram

if TYPE_CHECKING:
    from ..methods.kvquant import KVQuant

Found = list[dict[str, Tensor]]


class KVQuantCalibrator:
    """Gathers, per layer, ``key.low`` and ``key.high`` ``[C]``, ``key.threshold`` and
    ``value.threshold`` ``[2]``, ``key.levels`` and ``value.levels`` ``[2**bits]``: those that the
    options ask for."""

    def __init__(self, method: "KVQuant", views: Sequence[AttentionView]) -> None:
        from ..methods.key_value import KeyValueCodec

        self.method = method
        self.found: Found = [{} for _ in views]
        # Keys have their bias taken out as in the cache; how codes would be made does not matter here.
        codes = Codebook(1, "token", 0, torch.tensor([-1.0, 1.0]))
        self.codecs = [KeyValueCodec(v, codes, Plain(v.dtype), method.rope) for v in views]

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        if length <= self.method.sink:
            raise ValueError(f"samples of {length} tokens hold nothing but sinks: give longer ones")
        if self.method.has_spans or self.method.has_thresholds:
            ranges = RangeStage(self.method, self.found, samples * (length - self.method.sink))
            yield ranges
            ranges.finish()
        if self.method.datatype == "nuq":
            levels = LevelStage(self.method, self.found)
            yield levels
            levels.finish()

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{i}.{k}": t for i, found in enumerate(self.found) for k, t in found.items()}
        return {name: tensor.half().cpu() for name, tensor in named.items()}


class RangeStage:
    """Thresholds of key channels, or of whole matrices of keys and values."""

    gradients = False

    def __init__(self, method: "KVQuant", found: Found, tokens: int) -> None:
        self.method, self.found, self.tokens = method, found, tokens
        share = 0.0 if method.has_thresholds else method.share
        self.channels = [Extremes(share, tokens) for _ in found]
        self.matrices: list[dict[str, Extremes]] = [{} for _ in found]

    def see(self, position: int, rows: Rows) -> None:
        sink = self.method.sink
        self.channels[position].see(rows.key[sink:])
        if self.method.has_thresholds:
            for name, all_rows in (("key", rows.key), ("value", rows.value)):
                elements = all_rows[sink:].reshape(-1, 1)
                fresh = Extremes(self.method.share, self.tokens * all_rows.shape[1])
                self.matrices[position].setdefault(name, fresh).see(elements)

    def finish(self) -> None:
        for found, channels, matrices in zip(self.found, self.channels, self.matrices, strict=True):
            low, high = channels.bounds()
            for name, extremes in matrices.items():
                found[f"{name}.threshold"] = torch.cat(extremes.bounds())
            if self.method.has_thresholds:
                lowest, highest = found["key.threshold"]
                low, high = low.clamp(min=lowest), high.clamp(max=highest)
            if self.method.has_spans:
                found["key.low"], found["key.high"] = low, high


class LevelStage:
    """Levels of keys and of values by k-means, weighted with the diagonal Fisher information."""

    def __init__(self, method: "KVQuant", found: Found) -> None:
        self.method, self.found = method, found
        self.gradients = method.weighting != "none"
        self.histograms = [{"key": Histogram(), "value": Histogram()} for _ in found]

    def see(self, position: int, rows: Rows) -> None:
        found = {name: tensor.to(rows.key.device) for name, tensor in self.found[position].items()}
        keys, values = self.method.keys(found), self.method.values(found)
        histograms = self.histograms[position]
        self._add(histograms["key"], keys, rows.key, rows.key_gradient)
        self._add(histograms["value"], values, rows.value, rows.value_gradient)

    def _add(
        self, histogram: Histogram, quantizer: Codebook, x: Tensor, gradient: Tensor | None
    ) -> None:
        tokens = len(x)
        block = (
            self.method.group if quantizer.per == "channel" and quantizer.span is None else tokens
        )
        # Blocks as a cache would seal them; what does not fill one is left out.
        whole = max(tokens // block, 1) * block
        excluded = torch.arange(min(whole, tokens), device=x.device) < self.method.sink
        blocks = x[:whole].unflatten(0, (-1, min(block, tokens)))
        scaled = quantizer.scaled(blocks, excluded.unflatten(0, blocks.shape[:2]))
        kept = ~excluded.unflatten(0, blocks.shape[:2]).unsqueeze(-1).expand_as(blocks)
        if scaled.outliers is not None:
            kept = kept & ~scaled.outliers
        weight = torch.ones_like(scaled.x)
        if gradient is not None:
            weight = gradient[:whole].view_as(blocks).double().square()
            if self.method.weighting == "kvquant":
                weight = weight * scaled.wide_scale.double().square()
        histogram.see(scaled.x[kept], weight[kept])

    def finish(self) -> None:
        for found, histograms in zip(self.found, self.histograms, strict=True):
            for name, histogram in histograms.items():
                found[f"{name}.levels"] = histogram.levels(self.method.bits)

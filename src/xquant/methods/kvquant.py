from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration import Expected
from ..catalogue import short
from ..models import AttentionView
from ..quant import Codebook, Plain
from ..quant.codebook import normal_float_levels, uniform_levels
from .base import ROPE, SINK, Method, Tensors, option
from .key_value import KeyValueCodec

WIDTHS = (2, 3, 4, 16)
FARTHEST = 2
"""No level is farther out. They are in [-1, 1], but where fp16 rounds a tiny scale by half."""


def _bounds(pair: Tensor) -> tuple[Tensor, Tensor]:
    low, high = pair
    return low.clone(), high.clone()  # a view would keep both alive


@dataclass(frozen=True, kw_only=True)
class KVQuant(Method):
    """KVQuant (arXiv 2401.18079): non-uniform codes, outliers apart, keys per channel before RoPE.

    Stores K with scales of every channel found offline and V with an fp16 scale and zero per token, as
    codes into 2^b levels per layer; the outliers of each channel of K (offline thresholds) and of each
    token of V (found online) as an fp16 value and a 16-bit channel; the first token full:
    ``n (2 G D b) / 8 + 4 n + 2 n c + 4 outliers`` bytes in each layer for a block of n tokens, c the bytes of
    a token's outlier count (1 below 256 channels, else 2; none without outliers).

    Differs from the paper: offline ranges of keys are fitted to the levels; sparse rows of K are token
    by token too; a key bias is subtracted before quantizing.

    Examples:
        >>> from xquant import KVCache, KVQuant
        >>> KVQuant(bits=3, outliers=1).needs_calibration
        True
        >>> online = KVQuant(bits=3, outliers=1, datatype="nf", scales="online")
        >>> online.needs_calibration
        False
        >>> cache = KVCache(model, online)
    """

    name = "kvquant"
    paper = "KVQuant, arXiv 2401.18079"
    summary = "calibrated non-uniform codes, sparse outliers, first token full"
    example = "kvquant-3bit-1%"
    uncalibrated = "datatype=nf,scales=online"
    head_pattern = r"-(?P<bits>\d+)bit(-(?P<outliers>[\d.]+)%)?"

    bits: int = option(help="bits per code", choices=WIDTHS)
    outliers: float = option(0.0, "percent kept apart", most=10)
    sink: int = option(1, SINK)
    group: int = option(128, "tokens of a sealed block")
    datatype: str = option("nuq", "levels: calibrated, NormalFloat, uniform", choices=("nuq", "nf", "int"))
    weighting: str = option(
        "kvquant",
        "of k-means: Fisher information times squared scales, without scales, neither",
        choices=("kvquant", "fisher", "none"),
    )
    per: str = option("vector", "outlier thresholds per", choices=("vector", "matrix"))
    scales: str = option(
        "fitted",
        "ranges of keys: calibrated and fitted to the levels, calibrated, or per block",
        choices=("fitted", "offline", "online"),
    )
    rope: str = option("pre", **ROPE)

    @property
    def head(self) -> str:
        share = f"-{short(self.outliers)}%" if self.outliers else ""
        return f"{self.name}-{self.bits}bit{share}"

    @property
    def has_ranges(self) -> bool:
        """Whether the range of every key channel is found offline."""
        return self.scales != "online"

    @property
    def has_fitted_ranges(self) -> bool:
        """Whether it is then fitted to the levels."""
        return self.scales == "fitted"

    @property
    def has_matrix_thresholds(self) -> bool:
        """Whether outliers are what lies outside thresholds of whole matrices, found offline."""
        return self.per == "matrix" and self.outliers > 0

    @property
    def has_levels(self) -> bool:
        """Whether the levels are found offline."""
        return self.datatype == "nuq"

    @property
    def needs_calibration(self) -> bool:
        offline = self.has_ranges or self.has_matrix_thresholds or self.has_levels
        return self.bits != 16 and offline

    @property
    def calibrated_as(self) -> str:
        group = self.group if self.scales == "online" else 128
        return replace(self, tail=0, group=group).spec

    @property
    def share(self) -> float:
        """Of the elements that are outliers, 0 to 0.1."""
        return self.outliers / 100

    def expected_of(self, view: AttentionView) -> dict[str, Expected]:
        if not self.needs_calibration:
            return {}
        wanted: dict[str, Expected] = {}
        channels, whole = (Expected((2, n), torch.float16, rising=True) for n in (view.kv_width, 1))
        if self.has_ranges:
            wanted["key.range"] = channels
        if self.has_matrix_thresholds:
            wanted |= {"key.threshold": whole, "value.threshold": whole}
        elif self.has_ranges and self.outliers:
            wanted["key.threshold"] = channels
        if self.has_levels:
            levels = Expected((2**self.bits,), torch.float16, -FARTHEST, FARTHEST, rising=True)
            wanted |= {"key.levels": levels, "value.levels": levels}
        return wanted

    def codec(self, view: AttentionView, position: int, found: Tensors) -> KeyValueCodec:
        if self.bits == 16:
            return KeyValueCodec(view, Plain(view.dtype), Plain(view.dtype), self.rope)
        levels = ("key.levels", "value.levels")  # these stay where they are
        found = {n: t if n in levels else t.to(view.device) for n, t in found.items()}
        return KeyValueCodec(view, self.keys(found), self.values(found), self.rope)

    def keys(self, found: Tensors) -> Codebook:
        """The quantizer of keys. Levels that are not found yet are uniform."""
        threshold = span = None
        if self.has_ranges:
            span = _bounds(found["key.range"])
        if self.has_matrix_thresholds or (self.has_ranges and self.outliers):
            threshold = _bounds(found["key.threshold"])
        levels = self.levels(found.get("key.levels"))
        return Codebook(self.bits, "channel", 0, levels, self.share, threshold, span)

    def values(self, found: Tensors) -> Codebook:
        """The quantizer of values, likewise."""
        threshold = _bounds(found["value.threshold"]) if self.has_matrix_thresholds else None
        levels = self.levels(found.get("value.levels"))
        return Codebook(self.bits, "token", 0, levels, self.share, threshold)

    def levels(self, found: Tensor | None) -> Tensor:
        """The levels that the datatype asks for; ``found`` are the calibrated ones."""
        if self.datatype == "nf":
            return normal_float_levels(self.bits)
        return uniform_levels(self.bits) if found is None else found.float()

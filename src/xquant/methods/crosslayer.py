from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..calibration import Calibration
from ..models import AttentionView
from ..quant import Affine, Packed, Plain, Quantizer
from ..quant.quantizer import Granularity, dense
from .base import BITS, GROUP, ROPE, TAIL, Method, option
from .codec import LayerCodec
from .key_value import KeyValueCodec

ROUNDINGS = {"round": torch.round, "floor": torch.floor, "ceil": torch.ceil}
# Table 9, all of 32 layers: model and task -> kq, vq, km, vm, eta1, eta2
TABLE_9 = {
    "mistral-7b-v0.3-truthfulqa": (30, 2, 32, 16, 0, 0),
    "mistral-7b-v0.3-hotpotqa": (30, 2, 32, 16, 1 / 6, 0.045),
    "mistral-7b-v0.3-2wikimqa": (32, 0, 32, 16, 0, 0.09),
    "mistral-7b-v0.3-musique": (32, 0, 32, 16, 1 / 6, 0),
    "mistral-7b-instruct-v0.2-trec": (30, 2, 32, 16, 1 / 6, 0),
    "mistral-7b-instruct-v0.2-triviaqa": (30, 2, 32, 16, 1 / 6, 0.09),
    "mistral-7b-instruct-v0.2-samsum": (30, 2, 32, 16, 0, 0),
    "mistral-7b-instruct-v0.2-passage-count": (32, 0, 32, 16, 0, 0.045),
    "llama2-7b-truthfulqa": (28, 0, 32, 28, 1 / 3, 0),
    "llama2-7b-hotpotqa": (28, 0, 32, 28, 1 / 6, 0.045),
    "llama2-7b-2wikimqa": (28, 0, 32, 28, 1 / 3, 0.045),
    "llama2-7b-musique": (28, 0, 32, 28, 1 / 3, 0),
    "llama2-7b-chat-trec": (32, 0, 32, 20, 1 / 6, 0),
    "llama2-7b-chat-triviaqa": (32, 0, 32, 20, 1 / 6, 0),
    "llama2-7b-chat-samsum": (32, 0, 32, 20, 0, 0),
    "llama2-7b-chat-passage-count": (32, 0, 32, 20, 1 / 3, 0.045),
}


@dataclass(frozen=True, kw_only=True)
class CrossLayer(Method):
    """Cross-layer XQuant (arXiv 2510.11236): low-bit K and V whose codes neighbouring layers share.

    Layers from km (keys) and vm (values) on share the codes of their span of G layers; each keeps its
    own scales and zeros, moved inwards by eta (equation 9). 2 bits below layer kq (vq), 1 bit from there.
    Stores what `kivi` stores at those widths, without the codes that another layer holds.

    Differs from the paper: layers share from km and vm on for keys and values each (Algorithm 1 prints
    otherwise, its Table 9 and Appendix A do not); a span that is not whole shares nothing; keys before
    RoPE by default.

    Examples:
        >>> from xquant import CrossLayer
        >>> CrossLayer(kq=30, vq=2, km=32, vm=16).equivalent_bits(32)
        1.375
    """

    name = "crosslayer"
    not_causal = "stores codes of a layer above"
    paper = "XQuant (cross-layer), arXiv 2510.11236"
    summary = "as asymkv, codes shared between layers, ends of ranges drawn in"
    example = "crosslayer"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        name: dict(zip(("kq", "vq", "km", "vm", "eta1", "eta2"), values, strict=True))
        for name, values in TABLE_9.items()
    }

    tail: int = option(128, TAIL)
    group: int = option(32, GROUP)
    kq: int | None = option(None, "lowest layers with 2-bit keys; auto is all but the last span")
    vq: int | None = option(None, "lowest layers with 2-bit values; auto is the first span")
    km: int | None = option(None, "layer from which keys share codes; auto is none")
    vm: int | None = option(None, "layer from which values share codes; auto is half way up")
    eta1: float = option(1 / 6, "calibration of 1-bit codes, 0 for none", most=0.5)
    eta2: float = option(0.045, "calibration of 2-bit codes, 0 for none", most=0.5)
    span: int = option(2, "layers that share codes (G)", least=2)
    merge: str = option(
        "dominant",
        "codes of the dominant layer, or the weighted average, rounded so",
        choices=("dominant", *ROUNDINGS),
    )
    dominant: int = option(0, "the dominant layer of a span (k)")
    gamma: float = option(0.5, "weight of a span's first layer, the others share the rest", most=1)
    high: int = option(2, "bits of the lower layers", choices=BITS)
    low: int = option(1, "bits of the layers above", choices=BITS)
    rope: str = option("pre", **ROPE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dominant >= self.span:
            raise ValueError(
                f"crosslayer: dominant={self.dominant} is not one of the {self.span} layers of a span"
                " (counted from 0)"
            )

    @property
    def causal(self) -> bool:
        return self.merge == "dominant" and self.dominant == 0

    @property
    def source(self) -> int:
        """The layer of a span that holds the codes."""
        return self.dominant if self.merge == "dominant" else 0

    def bounds(self, layers: int) -> tuple[int, int, int, int]:
        """kq, vq, km and vm for a model of ``layers`` layers.

        Raises:
            ValueError: beyond the layers, or layers of a span whose codes differ in width.
        """
        whole = layers // self.span * self.span
        shared_from = layers if 16 in (self.high, self.low) else layers // 2 // self.span * self.span
        auto = (max(whole - self.span, 0), min(self.span, whole), layers, shared_from)
        given = {"kq": self.kq, "vq": self.vq, "km": self.km, "vm": self.vm}
        for name, value in given.items():
            if value is not None and value > layers:
                raise ValueError(
                    f"crosslayer: {name}={value} but {layers} layers are compressed in this model"
                )
        kq, vq, km, vm = (a if g is None else g for a, g in zip(auto, given.values(), strict=True))
        for wide, shared, bound, start in (("kq", "km", kq, km), ("vq", "vm", vq, vm)):
            for first in range(0, layers, self.span):
                sharers = self.sharers(first, start, layers)
                widths = {self._bits(i, bound) for i in (first + self.source, *sharers)}
                if sharers and (len(widths) > 1 or 16 in widths):
                    raise ValueError(
                        f"crosslayer: with {wide}={bound} and {shared}={start}, layers {first} to"
                        f" {first + self.span - 1} would share codes of"
                        f" {' and '.join(map(str, sorted(widths)))} bits: take {wide} as a multiple of"
                        f" {self.span}, or {shared} above"
                    )
        return kq, vq, km, vm

    def sharers(self, first: int, start: int, layers: int) -> list[int]:
        """Layers of the span from ``first`` on whose codes another holds, sharing from ``start`` on."""
        if first + self.span > layers or (self.merge != "dominant" and start > first):
            return []  # not whole; an average is of all its layers
        span = range(first, first + self.span)
        return [i for i in span if i >= start and i != first + self.source]

    def _bits(self, layer: int, bound: int) -> int:
        return self.high if layer < bound else self.low

    def equivalent_bits(self, layers: int) -> float:
        """The paper's equivalent bit-width of ``layers`` layers: codes alone (Appendix A, corrected)."""
        kq, vq, km, vm = self.bounds(layers)
        total = 0
        for bound, start in ((kq, km), (vq, vm)):
            spans = range(0, layers, self.span)
            shared = {i for first in spans for i in self.sharers(first, start, layers)}
            total += sum(self._bits(i, bound) for i in range(layers) if i not in shared)
        return total / (2 * layers)

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        kq, vq, km, vm = self.bounds(len(views))
        codecs: list[LayerCodec] = []
        for first in range(0, len(views), self.span):
            keys, values = (self.sharers(first, start, len(views)) for start in (km, vm))
            span = [
                SharingCodec(
                    view,
                    self.quantizer(self._bits(i, kq), "channel", view.dtype),
                    self.quantizer(self._bits(i, vq), "token", view.dtype),
                    self.rope,
                    (i in keys, i in values),
                )
                for i, view in enumerate(views[first : first + self.span], first)
            ]
            if keys or values:
                if len({view.state_width for view in views[first : first + self.span]}) > 1:
                    raise ValueError(
                        f"crosslayer: layers {first} to {first + self.span - 1} of this model differ in"
                        " their key/value heads: they cannot share codes"
                    )
                for codec in span:
                    codec.share(span, self)
            codecs.extend(span)
        return codecs

    def quantizer(self, bits: int, per: Granularity, dtype: torch.dtype) -> Quantizer:
        eta = {1: self.eta1, 2: self.eta2}.get(bits, 0.0)
        return Plain(dtype) if bits == 16 else Affine(bits, per, self.group, eta)


class SharingCodec(KeyValueCodec):
    """Keys and values whose codes may be those of another layer of the span."""

    def share(self, codecs: "Sequence[SharingCodec]", method: CrossLayer) -> None:
        """Belong to a span of ``codecs``."""
        self.span, self.source = len(codecs), method.source
        self._codecs, self._method = codecs, method

    def merge(self, packed: list[list[Packed]]) -> list[list[Packed]]:
        if self.span == 1:
            return packed
        for number, segment in enumerate(self.segments):
            fields = [layer[number] for layer in packed]
            shared = [codec.segments[number].shared for codec in self._codecs]
            if any(shared) and self._method.merge != "dominant":
                assert isinstance(segment.quantizer, Affine)
                quantizer, tokens = segment.quantizer, self._method.group
                shape = tokens, segment.channels
                codes = [quantizer.unpack(dense(stored, "codes"), *shape) for stored in fields]
                fields[self.source]["codes"] = quantizer.pack(mean_codes(self._method, codes))
            for stored, other in zip(fields, shared, strict=True):
                if other:
                    del stored["codes"]
        return packed


def mean_codes(method: CrossLayer, codes: Sequence[Tensor]) -> Tensor:
    """The weighted average of the codes (uint8) of a span's layers, rounded."""
    rest = (1 - method.gamma) / (method.span - 1)
    weights = [method.gamma, *[rest] * (method.span - 1)]
    mean = torch.stack([w * c.double() for w, c in zip(weights, codes, strict=True)]).sum(0)
    # Weights add up to 1 only nearly: 0.99999 must not be rounded down to 0.
    return ROUNDINGS[method.merge](mean.round(decimals=6)).to(torch.uint8)

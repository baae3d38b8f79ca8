"""The codec of cross-layer XQuant: keys and values whose codes layers share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant import Affine, Packed
from ..quant.quantizer import dense
from .crosslayer import CrossLayer
from .key_value import KeyValueCodec

ROUNDINGS = {"round": torch.round, "floor": torch.floor, "ceil": torch.ceil}


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

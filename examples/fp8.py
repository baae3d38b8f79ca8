"""fp8: keys and values as 8-bit floats, with a scale for each token."""

from dataclasses import dataclass

import torch

from xquant import Method, register
from xquant.methods.key_value import KeyValueCodec
from xquant.quant import Quantizer
from xquant.quant.quantizer import Field, dense

LARGEST = 448  # of torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Float8(Quantizer):
    def fields(self, tokens, channels):
        return {
            "scale": Field((tokens, 1), torch.float32, "ranges"),
            "codes": Field((tokens, channels), torch.uint8, "codes"),
        }

    def encode(self, x, excluded):
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-9) / LARGEST
        return {"scale": scale, "codes": (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)}

    def decode(self, packed, out):
        codes = dense(packed, "codes").view(torch.float8_e4m3fn)
        out.copy_(codes.float() * dense(packed, "scale"))


@register
@dataclass(frozen=True, kw_only=True)
class Fp8(Method):
    name, paper, example = "fp8", "none", "fp8"
    summary = "keys and values as 8-bit floats, a scale per token"

    def codec(self, view, position, found):
        return KeyValueCodec(view, Float8(), Float8(), rope="post")

from dataclasses import dataclass

import torch

from ..models import AttentionView
from ..quant import Affine, Codebook, Plain, Quantizer
from ..quant.codebook import normal_float_levels
from ..quant.quantizer import Granularity
from .base import BITS, ROPE, LayeredMethod, Tensors, option
from .key_value import KeyValueCodec

PER = ("token", "channel")


@dataclass(frozen=True, kw_only=True)
class PlainFormat(LayeredMethod):
    """Keys and values in one low-bit format, without anything done to help it."""

    head_pattern = r"(?P<bits>\d+)(-gs(?P<gs>\d+))?"

    gs: int = option(0, "elements of a group, 0 for the whole vector")
    group: int = option(128, "tokens of a sealed block")
    keys: Granularity = option(
        "token", "whether a range is of one token or of one channel, for keys", choices=PER
    )
    values: Granularity = option("token", "the same for values", choices=PER)
    rope: str = option("post", **ROPE)

    @property
    def head(self) -> str:
        return f"{self.name}{self.bits}" + (f"-gs{self.gs}" if self.gs else "")

    def codec(self, view: AttentionView, position: int, found: Tensors) -> KeyValueCodec:
        keys, values = self.layer_widths(position)
        return KeyValueCodec(
            view,
            self.quantizer(keys, self.keys, view.dtype),
            self.quantizer(values, self.values, view.dtype),
            self.rope,
        )


@dataclass(frozen=True, kw_only=True)
class Integer(PlainFormat):
    """Plain b-bit integers, the papers' int4, int4-gs64 (FlexGen) and int4-gs128 (Atom).

    Stores codes, and an fp16 scale and zero point for each group of gs channels of a token. With G key/value
    heads of size D that is ``n (2 G D b) / 8 + 8 n ceil(G D / gs)`` bytes in each layer for a block of n
    tokens. With ``keys=channel`` or ``values=channel`` a group is gs tokens of a channel.

    Differs from the papers: the zero point is fp16, not an integer. Per channel and without gs, a group is
    the channel's part of a block.

    Examples:
        >>> from xquant import Integer, parse_method
        >>> Integer(bits=4, gs=64) == parse_method("int4-gs64")
        True
    """

    name = "int"
    paper = "baselines of KVQuant (arXiv 2401.18079): FlexGen 2303.06865, Atom 2310.19102"
    summary = "keys and values as plain low-bit integers"
    example = "int4-gs64"

    def quantizer(self, bits: int, per: Granularity, dtype: torch.dtype) -> Quantizer:
        return Plain(dtype) if bits == 16 else Affine(bits, per, self.gs)


@dataclass(frozen=True, kw_only=True)
class NormalFloat(PlainFormat):
    """NormalFloat codes (arXiv 2305.14314), the papers' nf4 and nf4-gs128.

    Stores what `int` stores, with the 2^b levels of NormalFloat between the ends of each range.

    Differs from the papers: per channel without groups, the vector is the block.

    Examples:
        >>> from xquant import NormalFloat, parse_method
        >>> NormalFloat(bits=4) == parse_method("nf4")
        True
    """

    name = "nf"
    paper = "NormalFloat of QLoRA (arXiv 2305.14314), a baseline of KVQuant"
    summary = "keys and values as NormalFloat codes"
    example = "nf4-gs128"

    bits: int = option(help="bits per code", choices=BITS[1:])
    first_bits: int = option(4, "bits of the first_layers", choices=BITS[1:])

    def quantizer(self, bits: int, per: Granularity, dtype: torch.dtype) -> Quantizer:
        return Plain(dtype) if bits == 16 else Codebook(bits, per, self.gs, normal_float_levels(bits))

from dataclasses import dataclass

from ..models import AttentionView
from ..quant import Affine, hadamard
from .base import ROPE, CodedMethod, Tensors, option
from .rotated import RotatedCodec, range_channels


@dataclass(frozen=True, kw_only=True)
class KVLinC(CodedMethod):
    """The cache of KVLinC (arXiv 2510.05373): keys as they are, with a range per channel, and value heads
    times a Hadamard matrix, with a range per token.

    Stores K per channel in groups of g tokens, and V per token with an fp16 scale and zero for each head, or
    for each equal part of at most 128 channels of a larger head, b bits a code: ``n (2 G D b) / 8 + 4 G D + 4
    n G ceil(D / 128)`` bytes in each layer for a block of n = g tokens.

    Differs from the paper: there are no adapters. There, trained linear ones make up for what quantized keys
    do to attention. Keys are before RoPE by default, as in `Kivi`; we have not found what they are there. A
    key bias is then subtracted before quantizing. Recent tokens stay full until they fill a block. A value
    head whose size is no power of two is rotated by a Hartley matrix as well.

    Examples:
        >>> from xquant import KVCache, KVLinC
        >>> KVCache(model, KVLinC(bits=2, tail=128)).method.spec
        'kvlinc-2bit:tail=128'
    """

    name = "kvlinc"
    paper = "KVLinC, arXiv 2510.05373"
    summary = "keys per channel, rotated values per token, uniform codes"
    example = "kvlinc-2bit"

    rope: str = option("pre", **ROPE)

    def codec(self, view: AttentionView, position: int, found: Tensors) -> RotatedCodec:
        keys, values = self.layer_widths(position)
        return RotatedCodec(
            view,
            Affine(keys, "channel", self.group),
            Affine(values, "token", range_channels(view.value_size)),
            self.rope,
            (None, hadamard(view.value_size)),
            self.group,
        )

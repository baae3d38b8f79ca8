from dataclasses import dataclass

from ..models import AttentionView
from ..quant import Affine, hadamard
from .base import ROPE, CodedMethod, Tensors, option
from .rotated import RotatedCodec, both


@dataclass(frozen=True, kw_only=True)
class QuaRot(CodedMethod):
    """The cache of QuaRot (arXiv 2404.00456): heads times a Hadamard matrix, then integers per token.

    Stores b-bit codes of keys and values, and an fp16 scale and zero for each head of a token: ``n (2 G D b)
    / 8 + 8 n G`` bytes in each layer for a block of n tokens.

    Differs from the paper: weights and activations stay as they are; ranges are not clipped; a head whose
    size is no power of two is rotated by a Hartley matrix as well.

    Examples:
        >>> from xquant import KVCache, QuaRot
        >>> KVCache(model, QuaRot(bits=4, sink=4)).method.spec
        'quarot-4bit:sink=4'
    """

    name = "quarot"
    paper = "QuaRot, arXiv 2404.00456"
    summary = "rotated heads, uniform codes per token and head"
    example = "quarot-4bit"

    rope: str = option("post", **ROPE)

    def codec(self, view: AttentionView, position: int, found: Tensors) -> RotatedCodec:
        keys, values = self.layer_widths(position)
        return RotatedCodec(
            view,
            Affine(keys, "token", view.head_size),
            Affine(values, "token", view.value_size),
            self.rope,
            both(view, hadamard),
            self.group,
        )

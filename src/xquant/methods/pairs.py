from dataclasses import dataclass

from ..models import AttentionView
from ..quant.vectors import Pairs
from .base import ROPE, Method, Tensors, option
from .rotated import RotatedCodec, both, random_hadamard


@dataclass(frozen=True, kw_only=True)
class PairCodes(Method):
    """Rotated heads in codes of two channels each, as turbo-attn has them (a package for vLLM and SGLang).

    Stores ``2 b`` bits for every two channels of keys and values, and the root mean square of each head in
    fp16: ``n (2 G D b) / 8 + 4 n G`` bytes in each layer for a block of n tokens.

    Differs from it: the rotation is a Hadamard matrix with random signs, and not learned; points are those of
    two normal numbers.

    Examples:
        >>> from xquant import KVCache, PairCodes
        >>> KVCache(model, PairCodes(bits=3, sink=4)).method.spec
        'pairs-3bit:sink=4'
    """

    name = "pairs"
    paper = "two-dimensional codes, as those of turbo-attn"
    summary = "rotated heads, a code for two channels"
    example = "pairs-3bit"
    head_pattern = r"-(?P<bits>[234])bit"

    bits: int = option(help="bits a channel", choices=(2, 3, 4))
    rope: str = option("post", **ROPE)

    @property
    def head(self) -> str:
        return f"{self.name}-{self.bits}bit"

    def codec(self, view: AttentionView, position: int, found: Tensors) -> RotatedCodec:
        quantizers = Pairs(view.head_size, self.bits), Pairs(view.value_size, self.bits)
        return RotatedCodec(view, *quantizers, self.rope, both(view, random_hadamard), self.group)

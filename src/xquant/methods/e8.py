from dataclasses import dataclass

from ..models import AttentionView
from ..quant.vectors import E8
from .base import ROPE, Method, Tensors, option
from .rotated import RotatedCodec, both, random_hadamard


@dataclass(frozen=True, kw_only=True)
class Lattice(Method):
    """Rotated heads in codes of the lattice E8, as NexusQuant has them (vllm-project/vllm#47742) with the
    points of QuIP# (arXiv 2402.04396, section 4.2).

    Stores 16 bits for every eight channels of keys and values, and the root mean square of each head in fp16:
    ``n (2 G D 2) / 8 + 4 n G`` bytes in each layer for a block of n tokens.

    Differs from them: which 29 of the points of the outermost shell have a code is this project's choice; no
    token is dropped.

    Examples:
        >>> from xquant import KVCache, Lattice
        >>> KVCache(model, Lattice(bits=2, sink=4)).method.spec
        'e8-2bit:sink=4'
    """

    name = "e8"
    paper = "QuIP#, arXiv 2402.04396; NexusQuant, vllm-project/vllm#47742"
    summary = "rotated heads, a code of the lattice E8 for eight channels"
    example = "e8-2bit"
    head_pattern = r"-(?P<bits>2)bit"

    bits: int = option(help="bits a channel", choices=(2,))
    rope: str = option("post", **ROPE)

    @property
    def head(self) -> str:
        return f"{self.name}-{self.bits}bit"

    def codec(self, view: AttentionView, position: int, found: Tensors) -> RotatedCodec:
        quantizers = E8(view.head_size), E8(view.value_size)
        return RotatedCodec(view, *quantizers, self.rope, both(view, random_hadamard), self.group)

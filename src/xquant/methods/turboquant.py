from dataclasses import dataclass

import torch

from ..models import AttentionView
from ..quant import Quantizer
from ..quant.levels import normal_levels
from ..quant.scaled import Scaled, Sketched
from .base import ROPE, CodedMethod, Tensors, option
from .rotated import SEED, RotatedCodec, both, random_hadamard


@dataclass(frozen=True, kw_only=True)
class TurboQuant(CodedMethod):
    """TurboQuant (arXiv 2504.19874): randomly rotated heads, codes of the levels that are best for normal
    numbers, and the length of each head.

    Stores b-bit codes of keys and values, and the length of each head of a token in fp16: ``n (2 G D b) / 8 +
    4 n G`` bytes in each layer for a block of n tokens. With ``qjl`` keys have one bit a number less, and in
    its place the sign of a random projection of what is left, and its length (the paper's algorithm 2).

    Differs from the paper: the rotation is a Hadamard matrix with random signs; levels are those of the
    normal distribution, which heads of 64 and more are close to; all layers and channels have the same
    bits; ``qjl`` is for keys alone, as values are not multiplied with queries.

    Examples:
        >>> from xquant import KVCache, TurboQuant
        >>> cache = KVCache(model, TurboQuant(bits=3, qjl=True))
        >>> _ = model(**prompt, cache=cache)
        >>> cache.report().code_bits
        3.0
    """

    name = "turboquant"
    paper = "TurboQuant, arXiv 2504.19874"
    summary = "randomly rotated heads, levels of the normal distribution"
    example = "turboquant-3bit"

    qjl: bool = option(False, "one of a key's bits sketches what is left")
    rope: str = option("post", **ROPE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qjl and min(each.keys for each in self.used_widths) < 2:
            raise ValueError("turboquant: qjl=true needs 2 bits or more: one is the sketch's")

    def codec(self, view: AttentionView, position: int, found: Tensors) -> RotatedCodec:
        keys, values = self.layer_widths(position)
        return RotatedCodec(
            view,
            (self._sketched if self.qjl else self._by_length)(keys, view.head_size),
            self._by_length(values, view.value_size),
            self.rope,
            both(view, random_hadamard),
            self.group,
        )

    def _by_length(self, bits: int, size: int) -> Scaled:
        return Scaled(bits, size, normal_levels(bits), "norm")

    def _sketched(self, bits: int, size: int) -> Quantizer:
        generator = torch.Generator().manual_seed(SEED)
        return Sketched(
            self._by_length(bits - 1, size),
            torch.randn(size, size, generator=generator, dtype=torch.float32, device="cpu"),
        )

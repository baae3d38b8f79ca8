from dataclasses import dataclass

import torch

from ..models import AttentionView
from ..quant import Quantizer, hadamard
from ..quant.scaled import Scaled
from .base import ROPE, Method, Tensors, option
from .key_value import KeyValueCodec
from .rotated import RotatedCodec, both

BLOCK = 32
"""Channels of a block of llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Method):
    """The block formats of llama.cpp's caches, ``q4_0`` and ``q8_0``: codes of 32 channels with a scale.

    Stores codes of keys and values, and an fp16 scale for every 32 of them: 18 bytes a block of llama.cpp
    in 4 bits, 34 in 8. ``rotate`` rotates heads by a Hadamard matrix first.

    Differs from llama.cpp: blocks are cut from the keys (or values) of all heads beside each other, which is
    the same where heads are a multiple of 32; codes are made with the scale as fp16 holds it.

    Examples:
        >>> from xquant import KVCache, LlamaCpp
        >>> LlamaCpp(bits=4, rotate=True).spec
        'q4_0:rotate=true'
    """

    name = "q"
    paper = "llama.cpp, --cache-type-k and --cache-type-v"
    summary = "llama.cpp's q4_0 and q8_0: blocks of 32 channels with a scale"
    example = "q4_0"
    head_pattern = r"(?P<bits>[48])_0"

    bits: int = option(help="bits per code", choices=(4, 8))
    rotate: bool = option(False, "turn heads by a Hadamard matrix first")
    rope: str = option("post", **ROPE)

    @property
    def head(self) -> str:
        return f"{self.name}{self.bits}_0"

    def codec(self, view: AttentionView, position: int, found: Tensors) -> KeyValueCodec:
        keys, values = self._quantizer(), self._quantizer()
        if not self.rotate:
            return KeyValueCodec(view, keys, values, self.rope)
        return RotatedCodec(view, keys, values, self.rope, both(view, hadamard), self.group)

    def _quantizer(self) -> Quantizer:
        half = 2 ** (self.bits - 1)
        levels = torch.arange(-half, half, device="cpu").float()
        return Scaled(self.bits, BLOCK, levels, "signed peak" if self.bits == 4 else "peak")

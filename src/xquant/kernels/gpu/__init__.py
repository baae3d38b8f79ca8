"""Triton kernels, for layers on a GPU: `support` says what they read, and where they can run.

Triton comes with torch's builds for CUDA. It is imported only where one of these kernels is chosen.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from ...quant import Affine, Packed
from .angles import TurnBook

if TYPE_CHECKING:
    from ...layer import CompressedLayer
    from .attention import TritonAttention


def triton_attention(layer: "CompressedLayer", book: TurnBook) -> "TritonAttention":
    """What attends over one layer."""
    from .attention import TritonAttention

    return TritonAttention(layer, book)


def triton_encode(quantizer: Affine, x: Tensor, excluded: Tensor | None) -> Packed:
    """`Affine.encode` where `support.seals`."""
    from .sealing import encode

    return encode(quantizer, x, excluded)

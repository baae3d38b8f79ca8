"""Triton kernels, for layers on a GPU: `support` says what they read, and where they can run.

Triton comes with torch's builds for CUDA. It is imported only where one of these kernels is chosen.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from ...methods.xquant import Rematerialized
from ...methods.xquant_cl import DeltaCodec
from ...quant import Affine, Packed
from .angles import TurnBook
from .support import tiled

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer
    from .accumulate import TritonCarrier
    from .attention import TritonAttention
    from .rebuild import TritonRebuilt


def triton_attention(layer: "CompressedLayer", book: TurnBook) -> "TritonAttention | TritonRebuilt":
    """What attends over one layer."""
    from .attention import TritonAttention
    from .rebuild import TritonRebuilt

    rebuilt = isinstance(layer.codec, Rematerialized)
    return TritonRebuilt(layer, book) if rebuilt else TritonAttention(layer, book)


def triton_carrier(layer: "CompressedLayer") -> "TritonCarrier | None":
    """What sums a layer and those below it; None where that is left to torch."""
    from .accumulate import TritonCarrier

    codec = layer.codec
    fits = isinstance(codec, DeltaCodec) and tiled(codec.segments[0], layer.stream.block)
    return TritonCarrier(layer) if fits else None


def triton_encode(quantizer: Affine, x: Tensor, excluded: Tensor | None) -> Packed:
    """`Affine.encode` where `support.seals`."""
    from .sealing import encode

    return encode(quantizer, x, excluded)

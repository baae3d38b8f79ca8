"""The Triton backend: kernels for GPUs in ``jit/``, and beside them the Python that launches each.

In a decode step `attention` (keys and values) or `rebuild` (the rows that they are rebuilt from) launches the
kernels of one layer, with arguments that `launch` makes of the call and `addresses` of the packed blocks.
`attention` does so over a cache's slabs and over an engine's pages.
`accumulate` adds up sums over layers, `sealing` packs blocks.

Triton comes with torch's builds for CUDA. It is imported only where one of these kernels is used; `support`
says without it which layers they read, and where they can run.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from ...methods import LayerCodec
from ...past.angles import PagedAngles
from ...past.growing import Accumulator
from ...past.packer import Packer
from ...past.pages import PageLayout
from ...quant import Affine, Packed, Quantizer
from ...quant.quantizer import as_written
from ..backend import Backend, LayerAttention, Shared
from ..paged import PagedAttention
from . import support

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer


class TritonPacker(Packer):
    """Packs affine codes, of blocks of several layers as well, and the codes of codebooks by a launch, and
    decodes ranked codes by two."""

    def pack(self, quantizer: Quantizer, x: Tensor, excluded: Tensor | None) -> Packed:
        if not support.seals(quantizer, x):
            return super().pack(quantizer, x, excluded)
        from .sealing import pack_affine, pack_codebook

        if isinstance(quantizer, Affine):
            return pack_affine(quantizer, x, excluded)
        with as_written(x):
            return pack_codebook(quantizer, x, excluded)

    def unpack(self, quantizer: Quantizer, packed: Packed, out: Tensor) -> None:
        if not support.decodes(quantizer, out):
            return super().unpack(quantizer, packed, out)
        from .decoding import unpack_ranked

        unpack_ranked(quantizer, packed, out)

    def joins(self, quantizer: Quantizer, x: Tensor) -> bool:
        return type(quantizer) is Affine and support.seals(quantizer, x)


class Triton(Backend):
    """Attention, sums over layers and sealing by Triton's kernels."""

    name = "triton"
    tried = True

    @property
    def packer(self) -> Packer:
        return TritonPacker()

    @property
    def tried_packer(self) -> Packer:
        from .tried import TriedPacker

        return TriedPacker()

    def unfit(self, codec: LayerCodec, block: int) -> str:
        return support.unfit(codec, block)

    def missing(self, codec: LayerCodec) -> str:
        return support.missing(codec.view.device)

    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        from .attention import TritonAttention
        from .rebuild import TritonRebuilding

        kind: type[TritonAttention | TritonRebuilding] = TritonAttention
        if layer.codec.rematerialized is not None:
            kind = TritonRebuilding
        return kind(layer, shared)

    def paged(
        self, codec: LayerCodec, layout: PageLayout, angles: PagedAngles | None
    ) -> PagedAttention | None:
        if codec.rematerialized is not None:
            return None
        from .attention import TritonPages

        return TritonPages(codec, layout, angles)

    def accumulator(self, layer: "CompressedLayer") -> Accumulator | None:
        from .accumulate import TritonAccumulator

        codec = layer.codec
        fits = codec.sums_deltas and support.tiled(codec.segments[0], layer.stream.block)
        return TritonAccumulator(layer) if fits else None


BACKEND = Triton()

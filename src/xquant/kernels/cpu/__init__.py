"""The native backend: C++ in ``csrc/``, and beside it the Python that calls each file.

In a decode step `attention` (keys and values), or `rebuilding` or `ranked` (what they are rebuilt from),
points a structure of the C interface (`library`) to the blocks, the tail, the sinks and the newest tokens,
and calls the function for the instruction set of this machine. `sealing` packs and unpacks blocks.
"""

from typing import TYPE_CHECKING

from ...methods import LayerCodec
from ...quant.operand import RankedOperand
from ...store.packer import TORCH, Packer
from ...store.pages import PageLayout
from ..backend import Backend, LayerAttention, Shared
from ..paged import PagedAngles, PagedAttention
from . import attention, library, ranked, rebuild, rebuilding
from .paged import NativePages
from .paged_rebuilding import NativeRebuiltPages
from .sealing import NativePacker

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer


class Native(Backend):
    """The library's functions for one instruction set."""

    def __init__(self, isa: str) -> None:
        self.name = isa

    @property
    def packer(self) -> Packer:
        return NativePacker(self.name) if self.name in library.isas() else TORCH

    def unfit(self, codec: LayerCodec, block: int) -> str:
        if codec.rematerialized is None:
            return attention.unfit(codec, block)
        if _is_ranked(codec, block):
            return ranked.unfit(codec, block)
        return rebuild.unfit(codec, block)

    def missing(self, codec: LayerCodec) -> str:
        if library.library() is None:
            return library.absence()
        if not library.isas():
            return "this CPU has neither AVX2 nor AVX-512 VNNI"
        return "" if self.name in library.isas() else f"this CPU has not all of {self.name}"

    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        if layer.codec.rematerialized is None:
            return attention.NativeAttention(layer, self.name, shared.rope)
        if _is_ranked(layer.codec, layer.stream.block):
            return ranked.RankedAttention(layer, self.name, shared.rope)
        return rebuilding.rebuilding_attention(layer, self.name, shared.rope)

    def paged(
        self,
        codec: LayerCodec,
        layout: PageLayout,
        scaling: float,
        softcap: float,
        angles: PagedAngles | None,
    ) -> PagedAttention | None:
        rebuilt, block, isa = codec.rematerialized, layout.block, self.name
        if rebuilt is None:
            return NativePages(codec, layout, isa, scaling, softcap, angles)
        assert angles is not None
        if _is_ranked(codec, block):
            return ranked.RankedPages(rebuilt, layout, isa, scaling, softcap, angles)
        if not rebuild.ValueSum.fits(codec, block):
            return None
        keys = rebuild.KeyProduct(rebuilt, block, isa)
        sums = rebuild.ValueSum(codec, block, isa)
        return NativeRebuiltPages(codec, layout, isa, keys, sums, scaling, softcap, angles)


def _is_ranked(codec: LayerCodec, block: int) -> bool:
    return isinstance(codec.segments[0].operand(block), RankedOperand)


BACKENDS = {isa: Native(isa) for isa in library.ISAS}
"""By instruction set, best first."""


def best() -> Native:
    """The backend for the best instruction set of this machine; where there is none, one that says so."""
    return BACKENDS[next(iter(library.isas()), next(iter(BACKENDS)))]

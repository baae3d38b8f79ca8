"""The native backend: C++ in ``csrc/``, and beside it the Python that calls each file.

A decode step fills in a structure of the C interface (`library`), and calls the function for the instruction
set of this machine. A `Kernel` says in it how a layer is packed and what is asked: `attention` (keys and
values), `rebuild` and `ranked` (what they are rebuilt from). `growing` and `paged` say where blocks, recent
tokens and sinks lie. `prefill` reads prompts as they are.
`sealing` packs and unpacks blocks.
"""

from typing import TYPE_CHECKING

from ...methods import LayerCodec
from ...past.angles import PagedAngles
from ...past.exact import ExactAttention, torch_attention
from ...past.packer import TORCH, Packer
from ...past.pages import PageLayout
from ...past.stream import Stream
from ...quant.operand import RankedOperand
from ..backend import Backend, LayerAttention, Shared
from ..paged import PagedAttention
from . import attention, library, ranked, rebuild
from .attention import Kernel
from .growing import NativeAttention
from .paged import NativePages
from .prefill import NativePrefill
from .sealing import NativePacker

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer


class Native(Backend):
    """The library's functions for one instruction set."""

    def __init__(self, isa: str) -> None:
        self.name = isa

    @property
    def packer(self) -> Packer:
        return NativePacker(self.name) if self.name in library.isas() else TORCH

    @property
    def exact(self) -> ExactAttention:
        return NativePrefill(self.name) if self.name in library.isas() else torch_attention

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

    def _kernel(self, codec: LayerCodec, block: int, stream: Stream | None = None) -> Kernel:
        """Of a layer; the ``stream`` of one that grows."""
        rebuilt = codec.rematerialized
        if rebuilt is None:
            return attention.PackedKernel(codec, block, self.name)
        if _is_ranked(codec, block):
            return ranked.RankedKernel(rebuilt, block, self.name)
        return rebuild.RebuiltKernel(rebuilt, block, self.name, stream)

    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        kernel = self._kernel(layer.codec, layer.stream.block, layer.stream)
        return NativeAttention(layer, kernel, shared.rope)

    def paged(
        self, codec: LayerCodec, layout: PageLayout, angles: PagedAngles | None
    ) -> PagedAttention | None:
        block = layout.block
        if codec.rematerialized is None:
            angles = None if codec.rotated else angles
        elif not _is_ranked(codec, block) and not rebuild.ValueSum.fits(codec, block):
            return None
        return NativePages(self._kernel(codec, block), layout, angles)


def _is_ranked(codec: LayerCodec, block: int) -> bool:
    return isinstance(codec.segments[0].operand(block), RankedOperand)


BACKENDS = {isa: Native(isa) for isa in library.ISAS}
"""By instruction set, best first."""


def best() -> Native:
    """The backend for the best instruction set of this machine; where there is none, one that says so."""
    return BACKENDS[next(iter(library.isas()), next(iter(BACKENDS)))]

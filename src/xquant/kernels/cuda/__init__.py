"""The CUDA backend: attention over packed keys and values in CUDA C++, for GPUs of NVIDIA.

``csrc/`` has the kernel, compiled for each kind of layer when it is first used (`program`). `attention` gives
it what a cache has in its store, or an engine in its pages, by the structures of `arguments`. `support` says
which layers it reads. Blocks are packed by Triton.
"""

from typing import TYPE_CHECKING

from ...methods import LayerCodec
from ...past.angles import PagedAngles
from ...past.pages import PageLayout
from ..backend import Backend, LayerAttention, Shared
from ..paged import PagedAttention
from . import support

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer


class Cuda(Backend):
    """Attention by one launch for a layer."""

    name = "cuda"
    tried = True

    def unfit(self, codec: LayerCodec, block: int) -> str:
        return support.unfit(codec, block)

    def missing(self, codec: LayerCodec) -> str:
        return support.missing(codec.view.device)

    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        from .attention import CudaAttention

        return CudaAttention(layer, shared)

    def paged(
        self, codec: LayerCodec, layout: PageLayout, angles: PagedAngles | None
    ) -> PagedAttention | None:
        from .attention import CudaPages

        return CudaPages(codec, layout, angles)


BACKEND = Cuda()

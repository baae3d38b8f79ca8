"""The backends in plain torch, for every device: the reference, and attention a few blocks at a time."""

from typing import TYPE_CHECKING

from torch import Tensor

from ...methods import LayerCodec
from ...quant.operand import Operand
from ..backend import Backend, LayerAttention, Shared
from ..call import AttentionCall
from .folded import FoldedAttention
from .rebuild import DecodedAttention

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer

LEAST_BLOCK = 32
"""Tokens of a block from which on blockwise attention was measured to be faster than the reference on a
CPU."""


class Reference(Backend):
    """The truth: `CompressedLayer.read` decodes keys and values, and the model's own attention reads them."""

    name = "reference"

    def unfit(self, codec: LayerCodec, block: int) -> str:
        return ""

    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        return _LeftToTheModel()


class _LeftToTheModel(LayerAttention):
    """Has the seam call the model's attention."""

    def attend(self, call: AttentionCall) -> Tensor | None:
        return None


class Folded(Backend):
    """Blockwise attention: packed keys and values by `folded`, rebuilt ones by `rebuild`."""

    name = "folded"

    def unfit(self, codec: LayerCodec, block: int) -> str:
        if codec.rematerialized is not None:
            return ""
        operands = (segment.operand(block) for segment in codec.segments)
        sparse = (isinstance(operand, Operand) and operand.count_bytes for operand in operands)
        return "outliers are stored apart" if any(sparse) else ""

    def gains(self, codec: LayerCodec, block: int) -> bool:
        return codec.view.device.type == "cpu" and block >= LEAST_BLOCK

    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        rebuilt = layer.codec.rematerialized is not None
        return DecodedAttention(layer) if rebuilt else FoldedAttention(layer)


REFERENCE, FOLDED = Reference(), Folded()

"""Backend: what attends over a layer's packed past on some device, and packs its blocks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..methods import LayerCodec
from ..past.angles import PagedAngles
from ..past.exact import ExactAttention, torch_attention
from ..past.growing import Accumulator
from ..past.packer import TORCH, Packer
from ..past.pages import PageLayout
from ..quant import Plain
from .call import AttentionCall
from .paged import PagedAttention
from .rope import RopeTable
from .workspace import Workspace

if TYPE_CHECKING:
    from ..past.growing_layer import CompressedLayer

NOTHING_PACKED = "nothing is packed"
"""Why no kernel is needed."""


@dataclass(frozen=True)
class Shared:
    """What the layers of one cache share."""

    rope: RopeTable
    workspace: Workspace


class LayerAttention(ABC):
    """Attends over one layer. May hold addresses, so it is never copied with the cache."""

    reads_chunks = False
    """Whether it also answers more than `MOST_QUERIES` queries, chunks of a prompt, faster than the
    reference."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor | None:
        """Attention of the newest tokens over the store, their own past and themselves: ``[B, t, H, D]``, or
        None where the reference must answer."""


class Backend(ABC):
    """One way to attend over packed layers."""

    name: str
    """As ``KVCache(kernel=...)`` takes it."""
    tried: bool = False
    """Whether ``auto`` compares it with the reference before it takes it: see `trial`."""

    @property
    def packer(self) -> Packer:
        """What blocks are packed and unpacked with."""
        return TORCH

    @property
    def exact(self) -> ExactAttention:
        """What attends over states that are not packed, for many queries."""
        return torch_attention

    @property
    def tried_packer(self) -> Packer:
        """What ``auto`` packs with: where the backend is `tried`, what is compared with torch first."""
        return self.packer

    @abstractmethod
    def unfit(self, codec: LayerCodec, block: int) -> str:
        """Why it cannot attend over a layer of blocks of ``block`` tokens; empty where it can."""

    def missing(self, codec: LayerCodec) -> str:
        """Why it cannot run where the layer is; empty where it can."""
        return ""

    def gains(self, codec: LayerCodec, block: int) -> bool:
        """Whether it was measured to be faster than the reference on such a layer."""
        return True

    @abstractmethod
    def attention(self, layer: "CompressedLayer", shared: Shared) -> LayerAttention:
        """What attends over one layer that is not `unfit`."""

    def paged(
        self, codec: LayerCodec, layout: PageLayout, angles: PagedAngles | None
    ) -> PagedAttention | None:
        """What attends over one layer of an engine that is not `unfit`; None where it reads no pages of such
        a layer. ``angles`` are needed where keys are kept before RoPE."""
        return None

    def accumulator(self, layer: "CompressedLayer") -> Accumulator | None:
        """What adds a layer to those below it, where the backend has something faster than the codec."""
        return None


def unread(codec: LayerCodec) -> str:
    """Why no kernel can read a layer, only the reference; empty where one may."""
    if codec.view.latents is not None:
        return "latents (MLA) are decoded, and attended to as they are"
    if codec.view.value_size != codec.view.head_size:
        return "value heads of another size than key heads"
    if codec.rematerialized is not None:
        return ""
    if all(isinstance(segment.quantizer, Plain) for segment in codec.segments):
        return NOTHING_PACKED
    if not codec.packs_states:
        return "keys and values are rebuilt from other states"
    if codec.rotations[0] is not None and not codec.rotated:
        return "keys are rotated by a matrix before RoPE"
    return ""


def uncoded(codec: LayerCodec, block: int) -> str:
    """Why there is nothing to multiply with as it is in packed keys and values; empty where there is."""
    for segment, role in zip(codec.segments, ("keys", "values"), strict=True):
        if segment.operand(block) is None:
            return f"{role} are in no format that a kernel reads"
    return ""

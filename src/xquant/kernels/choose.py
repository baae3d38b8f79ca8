"""Which kernel attends over a layer, and why."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..methods import LayerCodec
from ..methods.key_value import KeyValueCodec
from ..methods.xquant import Rematerialized
from ..quant import Affine, Codebook
from ..quant.quantizer import Segment
from ..quant.ranked import Ranked
from . import KERNELS
from .blockwise import PartedAttention
from .cpu import library as native
from .cpu import ranked as ranked_products
from .cpu import rebuild as products
from .cpu.attention import PackedAttention
from .rebuilt import RebuiltAttention
from .rope import AngleBook
from .torch.folded import FoldedAttention
from .triton import support as triton
from .triton import triton_attention, triton_carrier
from .triton.angles import TurnBook

if TYPE_CHECKING:
    from ..store.layer import CompressedLayer
    from .triton.attention import TritonAttention
    from .triton.rebuild import TritonRebuilt

    Kernel = PackedAttention | PartedAttention | TritonAttention | TritonRebuilt

LEAST_BLOCK = 32
"""Tokens of a block from which on the folded kernel was measured to be faster than the reference."""


@dataclass(frozen=True)
class Choice:
    """A kernel, and why no faster one where it is not the fastest."""

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


def choose(codec: LayerCodec, block: int, through_store: bool, wanted: str = "auto") -> Choice:
    """The kernel for a layer of blocks of ``block`` tokens.

    Raises:
        ValueError: ``wanted`` is not a kernel, cannot run on this machine, or cannot read this layer.
    """
    if wanted not in KERNELS:
        raise ValueError(f"kernel is one of {', '.join(KERNELS)}, not '{wanted}'")
    if wanted == "reference":
        return Choice("reference", "asked for")
    unread = "every token reads the store" if through_store else _unfit(codec)
    if wanted == triton.NAME:
        packed = unread or triton.unfit(codec, block) or triton.missing(codec.view.device)
    else:
        packed = unread or _unfit_packed(codec, block) or _missing(wanted)
    folded = unread or _unfit_folded(codec)
    if wanted == "auto":
        if not packed:
            return Choice(native.paths()[0])
        gains = codec.view.device.type == "cpu" and block >= LEAST_BLOCK
        return Choice("folded" if gains and not folded else "reference", packed)
    why = folded if wanted == "folded" else packed
    if why:
        raise ValueError(f"kernel '{wanted}' cannot be used: {why}")
    return Choice(wanted, "" if wanted in native.paths()[:1] else "asked for")


def _missing(wanted: str) -> str:
    if native.library() is None:
        return "installed without the native library"
    if not native.paths():
        return "this CPU has neither AVX2 nor AVX-512 VNNI"
    if wanted != "auto" and wanted not in native.paths():
        return f"this CPU has not all of {wanted}"
    return ""


def _unfit(codec: LayerCodec) -> str:
    """Why only the reference can read a layer; empty where a kernel can."""
    if isinstance(codec, Rematerialized):
        return ""
    if type(codec).exact is not KeyValueCodec.exact or not isinstance(codec, KeyValueCodec):
        return "keys and values are rebuilt from other states"
    for segment, role in zip(codec.segments, ("keys", "values"), strict=True):
        if not isinstance(segment.quantizer, Affine | Codebook):
            return f"{role} are not quantized"
    return ""


def _unfit_folded(codec: LayerCodec) -> str:
    """Why plain torch gains nothing on a layer of packed keys and values; empty where it does."""
    sparse = (isinstance(s.quantizer, Codebook) and s.quantizer.sparse for s in codec.segments)
    return "outliers are stored apart" if any(sparse) else ""


def _unfit_packed(codec: LayerCodec, block: int) -> str:
    """Why the native kernels cannot read a layer of packed keys and values; empty where they can."""
    if isinstance(codec, Rematerialized):
        ranked = isinstance(codec.segments[0].quantizer, Ranked)
        return (ranked_products if ranked else products).unfit(codec, block)
    if codec.view.device.type != "cpu":
        return f"the layer is on {codec.view.device.type}"
    if codec.view.dtype not in native.DTYPES:
        return f"{codec.view.dtype} states"
    if codec.view.head_size % 32 or block % 32:
        return f"heads of {codec.view.head_size} in blocks of {block}: both must be multiples of 32"
    if not codec.rotated and codec.view.rotary_size != codec.view.head_size:
        return "the rotary embedding turns a part of a head"
    keys = codec.segments[0].quantizer
    if getattr(codec, "offset", None) is not None and getattr(keys, "per", "") == "token":
        return "a key bias beside ranges per token"
    return next(
        filter(None, map(_unfit_segment, codec.segments, ("key", "value"), (block, block))), ""
    )


def _unfit_segment(segment: Segment, role: str, block: int) -> str:
    quantizer = segment.quantizer
    assert isinstance(quantizer, Affine | Codebook)
    if isinstance(quantizer, Codebook) and quantizer.bits > 4:
        return f"a table of {2**quantizer.bits} levels for {role}s"
    tokens = quantizer.per == "channel"
    size = quantizer.range_size(block if tokens else segment.channels)
    # The kernel reads keys by 32 tokens and 4 channels, values by all tokens and 16 channels.
    if role == "value":
        fits = size >= block if tokens else size % 16 == 0
    else:
        fits = (size % 32 == 0 or size >= block) if tokens else size % 4 == 0
    return "" if fits else f"ranges of {size} {'tokens' if tokens else 'channels'} for {role}s"


def attention_of(
    layer: "CompressedLayer", name: str, book: AngleBook, turns: TurnBook
) -> "Kernel | None":
    """What attends over a layer by the kernel ``name``; None for the reference, which is the layer itself.

    Args:
        book, turns: the angles of a forward pass, for all layers of a cache.
    """
    if name == triton.NAME:
        layer.carrier = triton_carrier(layer)
        return triton_attention(layer, turns)
    if name == "reference":
        return None
    if isinstance(layer.codec, Rematerialized):
        return RebuiltAttention(layer, name)
    if name == "folded":
        return FoldedAttention(layer)
    return PackedAttention(layer, name, book)

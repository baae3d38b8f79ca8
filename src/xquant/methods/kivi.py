from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Segment
from .base import LayerCodec, QuantizedMethod, Seen
from .full import flat_heads


@dataclass(frozen=True, kw_only=True)
class Kivi(QuantizedMethod):
    """KIVI (arXiv 2402.02750), by default with keys before RoPE: KIVI* of arXiv 2508.10395.

    Stores K per channel in groups of g tokens and V per token in groups of g channels, b bits a code:
    ``n (2 G D b) / 8 + 4 G D + 4 n ceil(G D / g)`` bytes a block of n = g tokens and layer.

    Differs from the paper: recent tokens that are not yet a whole block stay full, K and V alike, so
    the tail is ``tail`` to ``tail + g - 1`` tokens; a key bias is taken out before quantizing.
    """

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "KIVI, arXiv 2402.02750"
    summary: ClassVar[str] = "keys per channel, values per token, uniform codes"
    example: ClassVar[str] = "kivi-2bit"

    rope: str = field(
        default="pre",
        metadata={"choices": ("pre", "post"), "help": "quantize keys before or after RoPE"},
    )

    def codecs(self, views: Sequence[AttentionView]) -> list[LayerCodec]:
        return [KiviCodec(view, self, self.layer_bits(i)) for i, view in enumerate(views)]


class KiviCodec(LayerCodec):
    def __init__(self, view: AttentionView, method: Kivi, bits: int) -> None:
        super().__init__(view)
        self.rotated = method.rope == "post"
        self.width = 2 * view.kv_width
        self.segments = (
            Segment(view.kv_width, method.quantizer(bits, "channel", view.dtype)),
            Segment(view.kv_width, method.quantizer(bits, "token", view.dtype)),
        )
        # A large key bias (Qwen2) would cost the fp16 zero points their precision.
        centred = not self.rotated and view.key_norm is None and bits < 16
        self.offset = view.key_bias if centred else None

    def features(self, seen: Seen) -> Tensor:
        key = flat_heads(seen.key) if self.rotated else self.view.finish_keys(seen.raw_key)
        return torch.cat([key, flat_heads(seen.value)], -1)

    def encode(self, features: Tensor, below: Tensor | None) -> Tensor:
        if self.offset is None:
            return features
        key, value = features.split(self.view.kv_width, -1)
        return torch.cat([key - self.offset, value], -1)

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.exact(recalled)
        return (key if self.offset is None else key + self.offset), value

    def exact(self, features: Tensor) -> tuple[Tensor, Tensor]:
        key, value = features.split(self.view.kv_width, -1)
        return key, value

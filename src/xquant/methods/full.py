from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..calibrate.artifact import Calibration
from ..models import AttentionView
from ..quant import Plain, Segment
from .base import LayerCodec, Method, Seen
from .key_value import flat_heads


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """The uncompressed cache, in the same store as every other method.

    Stores K (rotated) and V in the model's dtype: ``2 G D s`` bytes a token and layer, ``s`` the
    bytes of the dtype.
    """

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "none (baseline)"
    summary: ClassVar[str] = "keys and values in the model's own dtype"
    example: ClassVar[str] = "full"

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        return [FullCodec(view) for view in views]


class FullCodec(LayerCodec):
    rotated = True

    def __init__(self, view: AttentionView) -> None:
        super().__init__(view)
        self.width = 2 * view.kv_width
        self.segments = (Segment(self.width, Plain(view.dtype)),)

    def features(self, seen: Seen) -> Tensor:
        return torch.cat([flat_heads(seen.key), flat_heads(seen.value)], -1)

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = recalled.split(self.view.kv_width, -1)
        return key, value

from dataclasses import dataclass

from ..models import AttentionView
from ..quant import Plain, Segment
from .base import Method, Tensors
from .key_value import StateCodec


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """The uncompressed cache, in the same store as every other method.

    Stores K (after RoPE) and V in the model's dtype: ``2 G D s`` bytes a token and layer, ``s`` the
    bytes of the dtype.

    Examples:
        >>> from xquant import Full, KVCache
        >>> cache = KVCache(model, Full())  # or KVCache(model, "full")
        >>> _ = model(**prompt, cache=cache)
        >>> cache.report().bits_per_value  # this model is in fp32
        32.0
    """

    name = "full"
    paper = "none (baseline)"
    summary = "keys and values in the model's own dtype"
    example = "full"

    def codec(self, view: AttentionView, position: int, found: Tensors) -> "FullCodec":
        return FullCodec(view)


class FullCodec(StateCodec):
    """Rotated keys and values in the dtype of the model, in one segment."""

    rotated = True

    def __init__(self, view: AttentionView) -> None:
        super().__init__(view)
        self.segments = (Segment(self.width, Plain(view.dtype)),)

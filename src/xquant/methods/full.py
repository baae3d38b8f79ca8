from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Method

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..models import AttentionView
    from .codec import LayerCodec


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """The uncompressed cache, in the same store as every other method.

    Stores K (after RoPE) and V in the model's dtype: ``2 G D s`` bytes a token and layer, ``s`` the
    bytes of the dtype.

    Examples:
        >>> from xquant import Full, KVCache
        >>> cache = KVCache(model, Full())  # or KVCache(model, "full")
        >>> _ = model(**prompt, past_key_values=cache)
        >>> cache.report().bits_per_value  # this model is in fp32
        32.0
    """

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "none (baseline)"
    summary: ClassVar[str] = "keys and values in the model's own dtype"
    example: ClassVar[str] = "full"

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from .key_value import FullCodec

        return [FullCodec(view) for view in views]

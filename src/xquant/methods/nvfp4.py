from dataclasses import dataclass

from ..models import AttentionView
from ..quant.float4 import Float4
from .base import ROPE, Method, Tensors, option
from .key_value import KeyValueCodec


@dataclass(frozen=True, kw_only=True)
class NvFp4(Method):
    """NVFP4, the 4-bit floats of NVIDIA's Blackwell GPUs, as vLLM's caches ``nvfp4`` and ``nvfp4_4over6``.

    Stores codes of keys and values, and an 8-bit float as the scale of every 16 of them: 4.5 bits a number.
    The largest magnitude of a group becomes 6, the largest code. With ``four=true`` it becomes 4 where that
    leaves a smaller squared error (4/6, arXiv 2512.02010), since there is no code between 4 and 6.

    Differs from them: groups are cut from the keys (or values) of all heads beside each other, which is the
    same where heads are a multiple of 16. There is no further scale of a whole tensor, which vLLM takes as 1
    where a checkpoint gives none.

    Examples:
        >>> from xquant import KVCache, NvFp4
        >>> NvFp4(four=True).spec
        'nvfp4:four=true'
    """

    name = "nvfp4"
    paper = "NVFP4 of NVIDIA; with four=true 4/6, arXiv 2512.02010"
    summary = "4-bit floats, an 8-bit float as the scale of every 16"
    example = "nvfp4"

    four: bool = option(False, "let the largest magnitude of a group become 4 where that is nearer than 6")
    rope: str = option("post", **ROPE)

    def codec(self, view: AttentionView, position: int, found: Tensors) -> KeyValueCodec:
        quantizer = Float4((6.0, 4.0) if self.four else (6.0,))
        return KeyValueCodec(view, quantizer, quantizer, self.rope)

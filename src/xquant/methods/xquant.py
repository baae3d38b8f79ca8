from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from .base import QuantizedMethod

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..models import AttentionView
    from .codec import LayerCodec

FORMS = ("auto", "mha", "gqa")


@dataclass(frozen=True, kw_only=True)
class XQuant(QuantizedMethod):
    """XQuant (arXiv 2508.10395, sections 3.1 and 3.3.1): cache the layer input, rebuild K and V.

    MHA stores post-norm X per token: ``n d b / 8 + 4 n ceil(d / g)`` bytes a block of n = g tokens
    and layer. GQA stores the latents X U_k per channel and X U_v per token, which takes what `kivi`
    takes.

    Differs from the paper: nothing by default. ``rotate`` multiplies X (MHA) or X U_v (GQA) by an
    orthogonal matrix before quantizing; ``outlier=true`` is the paper's Table B.1.

    Examples:
        >>> from xquant import KVCache, XQuant
        >>> cache = KVCache(model, XQuant(bits=4, sink=1))  # or "xquant-4bit:sink=1"
        >>> _ = model(**prompt, past_key_values=cache)
        >>> cache.report().codec_bytes > 0  # the bases of the latents
        True
    """

    name: ClassVar[str] = "xquant"
    paper: ClassVar[str] = "XQuant, arXiv 2508.10395"
    summary: ClassVar[str] = "layer input X (MHA) or its SVD latents (GQA); K and V rematerialized"
    example: ClassVar[str] = "xquant-4bit"

    form: str = field(
        default="auto",
        metadata={"choices": FORMS, "help": "store X (mha) or its latents (gqa)"},
    )
    rotate: bool = field(
        default=False, metadata={"help": "rotate rows before quantizing per token"}
    )
    outlier: bool = field(
        default=False, metadata={"help": "keep the first channel of X U_k in fp16 (gqa form)"}
    )

    @property
    def built_from_weights(self) -> bool:
        return True

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from .xquant_codec import InputCodec, LatentCodec, is_mha

        if self.outlier and any(is_mha(self.form, view) for view in views):
            raise ValueError("xquant: outlier=true needs the gqa form (ask for it with form=gqa)")
        return [
            InputCodec(view, self, self.layer_bits(i))
            if is_mha(self.form, view)
            else LatentCodec(view, self, self.layer_bits(i))
            for i, view in enumerate(views)
        ]

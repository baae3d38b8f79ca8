from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from .base import QuantizedMethod, bits_field
from .xquant import FORMS, XQuant

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..models import AttentionView
    from .codec import LayerCodec


@dataclass(frozen=True, kw_only=True)
class XQuantCL(QuantizedMethod):
    """XQuant-CL (arXiv 2508.10395, sections 3.2 and 3.3.2): cache what each layer adds to its input.

    The lowest ``first_layers - 1`` layers are `xquant` at ``first_bits``; the next is the base, X per
    token at ``first_bits``; each layer above stores the delta of its X against the accumulated
    reconstruction, per token: MHA d channels, ``n d b / 8 + 4 n ceil(d / g)`` bytes a block of n = g
    tokens; GQA the 2 G D latents of the delta in the left basis of [W_k W_v].

    Differs from the paper: MHA takes deltas of the residual stream and recomputes the norm when K and
    V are rebuilt (``stream=post`` is the paper's section 3.1); the GQA base is the full X.

    Examples:
        >>> from xquant import KVCache, XQuantCL
        >>> method = XQuantCL(bits=2, sink=1, rotate=True)
        >>> method.spec
        'xquant-cl-2bit:sink=1,rotate=true'
        >>> cache = KVCache(model, method)
    """

    name: ClassVar[str] = "xquant-cl"
    paper: ClassVar[str] = "XQuant-CL, arXiv 2508.10395"
    summary: ClassVar[str] = "deltas of X between layers on an accumulator; K and V rematerialized"
    example: ClassVar[str] = "xquant-cl-2bit"

    first_layers: int = field(
        default=3,
        metadata={"least": 1, "help": "lowest layers given first_bits; the last is the base"},
    )
    form: str = field(
        default="auto",
        metadata={"choices": FORMS, "help": "deltas of X (mha) or their latents (gqa)"},
    )
    stream: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "post", "residual"),
            "help": "deltas of post-norm X, or of the residual stream with the norm recomputed;"
            " auto is residual for mha and post for gqa",
        },
    )
    accumulator: int = bits_field(16, help="bits of the accumulator e_b, 16 is full")
    rotate: bool = field(default=False, metadata={"help": "rotate deltas before quantizing"})

    @property
    def built_from_weights(self) -> bool:
        return True

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from .xquant_cl_codec import DeltaCodec
        from .xquant_codec import InputCodec, LatentCodec, is_mha

        if self.first_layers > len(views):
            raise ValueError(
                f"xquant-cl: first_layers={self.first_layers} but only {len(views)} layers are"
                " compressed in this model"
            )
        lower = XQuant(bits=self.first_bits, group=self.group, form=self.form, rotate=self.rotate)
        codecs: list[LayerCodec] = []
        for i, view in enumerate(views):
            mha = is_mha(self.form, view)
            if i < self.first_layers - 1:
                kind = InputCodec if mha else LatentCodec
                codecs.append(kind(view, lower, self.first_bits))
            else:
                codecs.append(DeltaCodec(view, self, mha, base=i == self.first_layers - 1))
        codecs[-1].feeds_above = False
        return codecs

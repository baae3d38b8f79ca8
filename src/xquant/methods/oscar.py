from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from .base import CALIBRATED_AT, TAIL, CodedMethod

if TYPE_CHECKING:
    from ..calibration import Calibration, Expected
    from ..models import AttentionView
    from .codec import LayerCodec


def _clip(default: float, of: str) -> Any:
    text = f"share of a {of} head's magnitudes that are not clipped; 1 clips none"
    return field(default=default, metadata={"least": 0.5, "most": 1, "help": text})


@dataclass(frozen=True, kw_only=True)
class Oscar(CodedMethod):
    """OSCAR (arXiv 2605.17757): heads turned by a matrix that was found from the model's queries, clipped,
    then integers per token.

    Stores b-bit codes of keys after RoPE and of values, and an fp16 scale and zero for each head of a token,
    or for each equal part of at most 128 channels of a larger head: ``n (2 G D b) / 8 + 8 n G ceil(D / 128)``
    bytes in each layer for a block of n tokens. The first 64 tokens and the last 256 stay full.

    Differs from the paper: calibrated on text that the model writes. Every head has its own matrix;
    ``matrix="layer"`` gives the heads of a layer one, as its code does. As there, the weight of a token in
    the covariance of values is ``k^T C k`` with C that of its queries, and what share is clipped is set, not
    found. Scales are fp16, where its code has fp32. Recent tokens stay full until they fill a block. A head
    whose size is no power of two is turned by a Hartley matrix as well.

    Examples:
        >>> from xquant import KVCache, Oscar, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "oscar-2bit", text, context=64, windows=4)
        >>> cache = KVCache(model, Oscar(bits=4, sink=4, tail=0), calibration=found)
        >>> cache.method.spec
        'oscar-4bit:sink=4,tail=0'
    """

    name: ClassVar[str] = "oscar"
    paper: ClassVar[str] = "OSCAR, arXiv 2605.17757"
    summary: ClassVar[str] = "heads in a basis found from queries, clipped, uniform codes"
    example: ClassVar[str] = "oscar-2bit"
    calibration_size: ClassVar[tuple[int, int]] = (512, 40)
    calibrates_itself: ClassVar[bool] = True

    sink: int = field(default=64, metadata={"help": "first tokens of a sequence kept full"})
    tail: int = field(default=256, metadata=TAIL)
    key_clip: float = _clip(0.96, "key")
    value_clip: float = _clip(0.92, "value")
    matrix: str = field(
        default="head",
        metadata={
            "choices": ("head", "layer"),
            "help": "for each head, or for the heads of a layer",
        },
    )

    @property
    def needs_calibration(self) -> bool:
        return True

    @property
    def calibrated_as(self) -> str:
        return Oscar(bits=CALIBRATED_AT, matrix=self.matrix).spec

    def expected(self, views: "Sequence[AttentionView]") -> "dict[str, Expected]":
        import torch

        from ..calibration import Expected

        return {
            f"{i}.{name}.turn": Expected((*self.matrices(view), size, size), torch.float32, -1, 1)
            for i, view in enumerate(views)
            for name, size in (("key", view.head_size), ("value", view.value_size))
        }

    def matrices(self, view: "AttentionView") -> tuple[int, ...]:
        """How many a layer has, as the first dimension of a shape; none where there is one."""
        return (view.kv_heads,) if self.matrix == "head" else ()

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from ..quant import Affine
        from .oscar_codec import OscarCodec
        from .rotated import range_channels

        found = self.found(views, calibration)
        return [
            OscarCodec(
                view,
                Affine(self.layer_bits(i), "token", range_channels(view.head_size)),
                Affine(self.layer_bits(i), "token", range_channels(view.value_size)),
                (found[i]["key.turn"], found[i]["value.turn"]),
                (self.key_clip, self.value_clip),
                self.group,
            )
            for i, view in enumerate(views)
        ]

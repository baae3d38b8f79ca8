from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from .base import CALIBRATED_AT, TAIL, Method, short

if TYPE_CHECKING:
    from ..calibration import Calibration, Expected
    from ..models import AttentionView
    from .codec import LayerCodec


@dataclass(frozen=True, kw_only=True)
class KVTC(Method):
    """KVTC (arXiv 2511.01815): the principal components of a token's keys in all layers, and of its values,
    in groups of equal width that dynamic programming chose; for caches at rest.

    Stores, of keys before RoPE and of values, integers of 2, 4 or 8 bits for each component that has bits,
    and an fp16 scale and zero for each group of a token: together at most ``b`` bits a value. The first 4
    tokens and the last 128 stay full. ``cache.save(path, pack="entropy")`` codes the integers.
    ``basis="joint"`` finds components of keys and values together, which loses far less.

    Differs from the paper: calibrated on text that the model writes, whose components are found exactly, not
    by a randomized SVD. Groups are of 16, 64, 256 or 1,024 components and begin at multiples of 16; the paper
    has groups of one component, too. Its 8-bit numbers are floating-point ones, here integers. It codes by
    DEFLATE, here zstd does it, and only in files.

    Examples:
        >>> from xquant import KVCache, KVTC, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "kvtc-2bit", text, context=64, windows=4)
        >>> cache = KVCache(model, KVTC(bits=4, tail=0), calibration=found)
        >>> cache.method.spec
        'kvtc-4bit:tail=0'
    """

    name: ClassVar[str] = "kvtc"
    paper: ClassVar[str] = "KVTC, arXiv 2511.01815"
    summary: ClassVar[str] = "principal components of all layers, bits by dynamic programming"
    example: ClassVar[str] = "kvtc-1bit"
    head_pattern: ClassVar[str] = r"-(?P<bits>[\d.]+)bit"
    calibration_size: ClassVar[tuple[int, int]] = (512, 40)
    calibrates_itself: ClassVar[bool] = True
    sized_by_calibration: ClassVar[bool] = True
    not_causal: ClassVar[str] = "codes layers together"

    bits: float = field(metadata={"help": "bits a value", "least": 0.1, "most": 8})
    sink: int = field(default=4, metadata={"help": "first tokens of a sequence kept full"})
    tail: int = field(default=128, metadata=TAIL)
    span: int = field(default=0, metadata={"help": "layers that are coded together; 0: all"})
    basis: str = field(
        default="apart",
        metadata={
            "choices": ("apart", "joint"),
            "help": "components of keys and of values, or of both together",
        },
    )

    @property
    def head(self) -> str:
        return f"{self.name}-{short(self.bits)}bit"

    @property
    def causal(self) -> bool:
        return self.span == 1

    @property
    def needs_calibration(self) -> bool:
        return True

    @property
    def calibrated_as(self) -> str:
        return replace(self, bits=CALIBRATED_AT, sink=4, tail=128, group=128).spec

    def kinds(self, view: "AttentionView") -> dict[str, int]:
        """What has components of its own, in the order of a row, with its numbers of a token in a layer."""
        if self.basis == "joint":
            return {"state": view.state_width}
        return {"key": view.kv_width, "value": view.state_width - view.kv_width}

    def spans(self, layers: int) -> list[range]:
        """The numbers of the layers that are coded together, of so many."""
        size = self.span or layers
        return [range(at, min(at + size, layers)) for at in range(0, layers, size)]

    def expected(self, views: "Sequence[AttentionView]") -> "dict[str, Expected]":
        import torch

        from ..calibration import Expected
        from ..quant.affine import FP16_MAX
        from .kvtc_codec import choices

        wanted: dict[str, Expected] = {}
        for span in self.spans(len(views)):
            widths = {number: self.kinds(views[number]) for number in span}
            for kind in widths[span.start]:
                count = sum(own[kind] for own in widths.values())
                size = (len(choices(count)),)
                wanted[f"{span.start}.{kind}.error"] = Expected(size, torch.float32, least=0)
                for number, own in widths.items():
                    basis = Expected((count, own[kind]), torch.float16, -1, 1)
                    wanted[f"{number}.{kind}.basis"] = basis
            for number in span:
                size = (views[number].state_width,)
                wanted[f"{number}.mean"] = Expected(size, torch.float32, -FP16_MAX, FP16_MAX)
        return wanted

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from .kvtc_codec import KVTCCodec, chosen

        found = self.found(views, calibration)
        codecs: list[LayerCodec] = []
        for numbers in self.spans(len(views)):
            groups, lowest = {}, found[numbers.start]
            for kind in self.kinds(views[numbers.start]):
                count = len(lowest[f"{kind}.basis"])
                groups[kind] = chosen(lowest[f"{kind}.error"], count, int(self.bits * count))
            if not any(groups.values()):
                raise ValueError(
                    f"{self.spec}: no group of components takes so few bits: take more bits, or"
                    " code more layers together"
                )
            span = [KVTCCodec(views[i], found[i], self.group, groups) for i in numbers]
            for codec in span:
                codec.join(span)
            codecs += span
        return codecs

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, TypeVar

from .base import CALIBRATED_AT, Method, short

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibration import Calibration, Expected
    from ..models import AttentionView
    from .codec import LayerCodec

Each = TypeVar("Each")

EMBEDDED = 256
"""Numbers that are known of every token of the vocabulary, at most."""


@dataclass(frozen=True, kw_only=True)
class Transform(Method):
    """Transform coding (docs/methods/transform.md): keys before RoPE and values of a layer together, in the
    basis in which they are uncorrelated and every error costs the same.

    Stores, for a block of n tokens, the codes of C channels at 0 to 8 bits each and 4 bits for the scale of
    each: ``n b 2 G D / 8`` bytes for a layer on average, scales included. Layers get bits by what they are
    worth.

    Examples:
        >>> from xquant import KVCache, Transform, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "tc-2bit", text, context=64, windows=4)
        >>> cache = KVCache(model, Transform(bits=1.5), calibration=found)
    """

    name: ClassVar[str] = "tc"
    paper: ClassVar[str] = "none: transform coding, docs/methods/transform.md"
    summary: ClassVar[str] = "keys and values in the basis where bits cost least, any bits a value"
    example: ClassVar[str] = "tc-2bit"
    head_pattern: ClassVar[str] = r"-(?P<bits>[\d.]+)bit"
    calibration_size: ClassVar[tuple[int, int]] = (512, 40)
    calibrates_itself: ClassVar[bool] = True
    narrowest: ClassVar[float] = 1
    """Bits of the narrowest codes. With half a bit a channel would cost as much to decode as any other, and
    from 2 bits a value on it gains nothing."""

    bits: float = field(metadata={"help": "bits a value", "least": 0.1, "most": 8})
    sink: int = field(default=4, metadata={"help": "first tokens of a sequence kept full"})
    group: int = field(
        default=128, metadata={"step": 16, "help": "tokens of a sealed block, and of a scale"}
    )
    metric: str = field(
        default="fisher",
        metadata={"choices": ("fisher", "identity"), "help": "what an error costs"},
    )
    basis: str = field(
        default="joint",
        metadata={
            "choices": ("joint", "keys-first", "head"),
            "help": "of all heads together, of keys and then of the values' rest, or of each head",
        },
    )

    @property
    def head(self) -> str:
        return f"{self.name}-{short(self.bits)}bit"

    @property
    def layers_below(self) -> int:
        """How many a layer is predicted from."""
        return 0

    @property
    def layers_together(self) -> int:
        """How many are coded together."""
        return 1

    def finds_keys_first(self, view: "AttentionView") -> bool:
        """Whether keys of a layer have channels of their own. Where keys and values have fewer channels than
        numbers that would be more channels, and no fewer to rebuild keys from."""
        from .transform_codec import channels

        return self.basis == "keys-first" and channels(view) == view.state_width

    def known(self, views: "Sequence[AttentionView]") -> int:
        """Numbers of a token that a layer is predicted from beside the layers below; 0 for none."""
        return 0

    @property
    def needs_calibration(self) -> bool:
        return True

    @property
    def calibrated_as(self) -> str:
        return replace(self, bits=CALIBRATED_AT, sink=4, tail=0, group=128).spec

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from .transform_codec import runs

        found = self.found(views, calibration)
        each_layer = zip(views, found, strict=True)
        parts = [layer["profile"].split(runs(view, layer)) for view, layer in each_layer]
        counts = iter(self.allotted(views, [profile for each in parts for profile in each]))
        codecs = [
            self.codec(view, layer, list(islice(counts, len(each))))
            for view, layer, each in zip(views, found, parts, strict=True)
        ]
        if calibration is not None and self.known(views):
            codecs[0].embedding = calibration.tensors["embedding"].to(views[0].device)
        return codecs

    def allotted(
        self, views: "Sequence[AttentionView]", profiles: "Sequence[Tensor]"
    ) -> list[tuple[int, ...]]:
        """The counts of `Ranked` for each profile: together they take ``bits`` a value, scales included.

        Raises:
            ValueError: the scales alone take more.
        """
        from ..quant.ranked import allot, side_nbytes

        values = sum(view.state_width for view in views)
        sides = sum(side_nbytes(len(profile), self.group) for profile in profiles)
        scales = -(-8 * sides // self.group)  # bits a token
        budget = int(self.bits * values) - scales
        if budget < 0:
            raise ValueError(
                f"{self.spec}: the scales of blocks of {self.group} tokens alone take"
                f" {scales / values:.2f} bits a value: take more bits or a larger group"
            )
        return allot(profiles, budget, self.narrowest)

    def expected(self, views: "Sequence[AttentionView]") -> "dict[str, Expected]":
        import torch

        from ..calibration import Expected
        from ..quant.affine import FP16_MAX
        from ..quant.ranked import FARTHEST_STEP
        from .transform_codec import channels

        wanted: dict[str, Expected] = {}
        if tokens := self.known(views):
            wanted["embedding"] = Expected((views[0].vocabulary, tokens), torch.float16)
        for i, view in enumerate(views):
            width, count = view.state_width, channels(view)
            start = i // self.layers_together * self.layers_together
            span = views[start : start + self.layers_together]
            of_span = sum(other.state_width for other in span), sum(map(channels, span))
            layer = {
                "mean": Expected((width,), torch.float32, -FP16_MAX, FP16_MAX),
                "analysis": Expected((count, of_span[0]), torch.float16),
                "synthesis": Expected((width, of_span[1]), torch.float16),
                "usual": Expected((count,), torch.int16, -FARTHEST_STEP, FARTHEST_STEP),
                "profile": Expected((count,), torch.float32, least=0),
            }
            if self.finds_keys_first(view):
                layer["from_keys"] = Expected((width - view.kv_width, view.kv_width), torch.float16)
            if below := views[max(start - self.layers_below, 0) : start]:
                known = sum(other.state_width for other in below)
                layer["predictor"] = Expected((width, known), torch.float16)
            if tokens:
                layer["of_token"] = Expected((width, tokens), torch.float16)
            wanted |= {f"{i}.{name}": each for name, each in layer.items()}
        return wanted

    def codec(
        self, view: "AttentionView", found: "dict[str, Tensor]", counts: list[tuple[int, ...]]
    ) -> "LayerCodec":
        """The codec of a layer from its calibrated tensors."""
        from .transform_codec import TransformCodec

        return TransformCodec(view, found, self.group, counts)


@dataclass(frozen=True, kw_only=True)
class PredictedTransform(Transform):
    """Transform coding with prediction (docs/methods/transform.md): what a prediction from the layers below
    and the token leaves over.

    Stores what `tc` stores, of the difference to a linear prediction from the decoded keys and values of the
    layers below and from the token's embedding; and of every token its id, 4 bytes for all layers.

    Examples:
        >>> from xquant import PredictedTransform
        >>> PredictedTransform(bits=1, tail=128).spec
        'tc-cl-1bit:tail=128'
    """

    name: ClassVar[str] = "tc-cl"
    summary: ClassVar[str] = "as tc, of what a prediction from the layers below leaves over"
    example: ClassVar[str] = "tc-cl-1bit"
    not_causal: ClassVar[str] = "codes layers together"
    narrowest: ClassVar[float] = 0.5
    basis: str = field(
        default="joint",
        metadata={"choices": ("joint", "head"), "help": "of all heads together, or of each"},
    )
    reach: int = field(
        default=2, metadata={"least": 1, "help": "layers below that a layer is predicted from"}
    )

    embedding: bool = field(
        default=True,
        metadata={"help": "predict from the token's embedding, too"},
    )

    span: int = field(
        default=1, metadata={"least": 1, "help": "layers that are coded together, at rest"}
    )

    @property
    def causal(self) -> bool:
        return self.span == 1

    @property
    def layers_below(self) -> int:
        return self.reach

    @property
    def layers_together(self) -> int:
        return self.span

    def known(self, views: "Sequence[AttentionView]") -> int:
        return min(EMBEDDED, views[0].hidden) if self.embedding and views[0].vocabulary else 0

    def codecs(
        self, views: "Sequence[AttentionView]", calibration: "Calibration | None" = None
    ) -> "list[LayerCodec]":
        from .transform_codec import PredictedCodec

        codecs = super().codecs(views, calibration)
        predicted = [codec for codec in codecs if isinstance(codec, PredictedCodec)]
        for i, codec in enumerate(predicted):
            carried = predicted[max(i + 1 - self.reach, 0) : i + 1]
            codec.accumulated_width = sum(each.width for each in carried)
        if self.span > 1:
            for span in spans(predicted, self.span):
                for codec in span:
                    codec.join(span, self.reach if span[-1] is not codecs[-1] else 1)
        codecs[-1].feeds_above = False
        return codecs

    def codec(
        self, view: "AttentionView", found: "dict[str, Tensor]", counts: list[tuple[int, ...]]
    ) -> "LayerCodec":
        from .transform_codec import PredictedCodec

        return PredictedCodec(view, found, self.group, counts)


def spans(layers: Sequence[Each], size: int) -> list[Sequence[Each]]:
    """Layers, bottom up, ``size`` at a time; the last span may have fewer."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]

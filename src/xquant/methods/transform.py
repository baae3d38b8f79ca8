from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calibration import Calibration, Expected
from ..catalogue import short
from ..models import AttentionView
from ..models.base import linear
from ..quant import Segment
from ..quant.affine import FP16_MAX
from ..quant.classes import Classed, class_nbytes
from ..quant.ranked import Ranked, allot, side_nbytes
from ..quant.steps import FARTHEST_STEP
from ..quant.trellis import CIRCLE
from .base import CALIBRATED_AT, OWN_TEXTS, SINK, Method, Tensors, option
from .codec import LayerCodec, Rematerialized, by_block
from .key_value import StateCodec

CHANNELS_TO_A_REST = 6
"""One of so many channels of latents has a rest."""
Counts = Sequence[tuple[int, ...]]
"""Of each segment of a layer, or of each class of its tokens, the counts of `Ranked`."""


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

    name = "tc"
    paper = "none: transform coding, docs/methods/transform.md"
    summary = "keys and values in the basis where bits cost least, any bits a value"
    example = "tc-2bit"
    head_pattern = r"-(?P<bits>[\d.]+)bit"
    calibration_size = OWN_TEXTS
    calibrates_itself = True
    with_classes: ClassVar[dict[str, Any]] = {"basis": "joint", "metric": "fisher"}
    """What other options must be where tokens are in classes."""
    narrowest: ClassVar[float] = 1
    """Bits of the narrowest codes. With half a bit a channel would cost as much to decode as any other, and
    from 2 bits a value on it gains nothing."""

    bits: float = option(help="bits a value", least=0.1, most=8)
    sink: int = option(4, SINK)
    group: int = option(128, "tokens of a sealed block, and of a scale", step=16)
    metric: str = option("fisher", "what an error costs", choices=("fisher", "identity"))
    basis: str = option(
        "joint",
        "of all heads together, of keys and then of the values' rest, or of each head",
        choices=("joint", "keys-first", "head"),
    )
    classes: int = option(1, "classes of a block's tokens: the costlier have more bits", choices=(1, 2, 4))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes > 1:
            for name, wanted in self.with_classes.items():
                if getattr(self, name) != wanted:
                    raise ValueError(f"{self.name}: classes={self.classes} needs {name}={wanted}")
        least = CIRCLE * self.classes
        if self.group % least:
            raise ValueError(
                f"{self.name}: classes={self.classes} needs blocks of a multiple of {least} tokens, not"
                f" group={self.group}"
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

    def finds_keys_first(self, view: AttentionView) -> bool:
        """Whether keys of a layer have channels of their own. They have none where `channels` are fewer than
        numbers: keys alone would take as many of them."""
        return self.basis == "keys-first" and channels(view) == view.state_width

    @property
    def weighs_tokens(self) -> bool:
        """Whether errors of tokens count by what they are predicted to cost."""
        return self.metric == "fisher"

    def rests(self, view: AttentionView) -> int:
        """How many channels of a layer have a rest, see `Ranked`: latents vary most in a few channels, which
        are worth more than the 8 bits of the widest codes."""
        plain = self.basis == "joint" and self.layers_together == 1 and self.classes == 1
        return channels(view) // CHANNELS_TO_A_REST if plain and view.latents is not None else 0

    def known(self, views: Sequence[AttentionView]) -> int:
        """Numbers of a token that a layer is predicted from beside the layers below; 0 for none."""
        return 0

    @property
    def calibrated_as(self) -> str:
        return replace(self, bits=CALIBRATED_AT, sink=4, tail=0, group=128).spec

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        found = self.found(views, calibration)
        parts = [self._profiles(view, layer) for view, layer in zip(views, found, strict=True)]
        counts = iter(self.allotted(views, [profile for each in parts for profile in each]))
        codecs = [
            self._codec(view, layer, list(islice(counts, len(each))))
            for view, layer, each in zip(views, found, parts, strict=True)
        ]
        if calibration is not None and self.known(views):
            codecs[0].embedding = calibration.tensors["embedding"].to(views[0].device)
        return codecs

    def _profiles(self, view: AttentionView, found: Tensors) -> Sequence[Tensor]:
        """The profiles of a layer: of each class of tokens, or of each segment."""
        profile = found["profile"]
        return profile.chunk(self.classes) if self.classes > 1 else of_segments(view, found, profile)

    def allotted(self, views: Sequence[AttentionView], profiles: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """The counts of `Ranked` for each profile: together they take ``bits`` a value, scales included.

        Raises:
            ValueError: the scales alone take more.
        """
        values = sum(view.state_width for view in views)
        scales = side_bits(profiles, self.group, self.classes)
        budget = (int(self.bits * values) - scales) * self.classes
        if budget < 0:
            raise ValueError(
                f"{self.spec}: the scales of blocks of {self.group} tokens alone take"
                f" {scales / values:.2f} bits a value: take more bits or a larger group"
            )
        return allot(profiles, budget, self.narrowest)

    def expected(self, views: Sequence[AttentionView]) -> dict[str, Expected]:
        wanted: dict[str, Expected] = {}
        if tokens := self.known(views):
            wanted["embedding"] = Expected((views[0].vocabulary, tokens), torch.float16)
        for i, view in enumerate(views):
            width, count = view.state_width, channels(view)
            packed = (count + self.rests(view)) * self.classes
            start = i // self.layers_together * self.layers_together
            span = views[start : start + self.layers_together]
            of_span = sum(other.state_width for other in span), sum(map(channels, span))
            layer = {
                "mean": Expected((width,), torch.float32, -FP16_MAX, FP16_MAX),
                "analysis": Expected((count, of_span[0]), torch.float16),
                "synthesis": Expected((width, of_span[1]), torch.float16),
                "usual": Expected((packed,), torch.int16, -FARTHEST_STEP, FARTHEST_STEP),
                "profile": Expected((packed,), torch.float32, least=0),
            }
            if self.weighs_tokens:
                layer["costs"] = Expected((width,), torch.float32, -FP16_MAX, FP16_MAX)
            if self.finds_keys_first(view):
                layer["from_keys"] = Expected((width - view.kv_width, view.kv_width), torch.float16)
            if below := views[max(start - self.layers_below, 0) : start]:
                known = sum(other.state_width for other in below)
                layer["predictor"] = Expected((width, known), torch.float16)
            if tokens:
                layer["of_token"] = Expected((width, tokens), torch.float16)
            wanted |= {f"{i}.{name}": each for name, each in layer.items()}
        return wanted

    def _codec(self, view: AttentionView, found: Tensors, counts: Counts) -> LayerCodec:
        """The codec of a layer from its calibrated tensors."""
        return TransformCodec(view, found, self.group, counts)


def channels(view: AttentionView) -> int:
    """``C``: keys and values that come from X alone have no more dimensions than X."""
    width = view.state_width
    return width if view.key_norm is not None else min(width, view.hidden)


def of_segments(view: AttentionView, found: Tensors, of_channels: Tensor) -> Sequence[Tensor]:
    """The parts of a tensor ``[C]`` that belong to each segment: to all channels, or to those that keys come
    from and to those that only values come from."""
    return of_channels.tensor_split([view.kv_width]) if "from_keys" in found else [of_channels]


def side_bits(profiles: Sequence[Tensor], block: int, classes: int) -> int:
    """Bits a token of all that blocks of so many tokens have beside codes, of the layers with these
    ``profiles``, one for each of their classes of tokens."""
    sides = sum(side_nbytes(len(profile), block // classes) for profile in profiles)
    if classes > 1:
        sides += class_nbytes(block, classes) * len(profiles) // classes
    return -(-8 * sides // block)


def quantizer_of(usual: Tensor, counts: Counts, costs: Tensor | None, rests: int = 0) -> Ranked | Classed:
    """The quantizer of a segment with these usual scales ``[C]`` and costs of tokens, or, with several
    ``counts``, of that many classes of tokens, whose usual scales ``[classes C]`` lie one after the other."""
    if len(counts) == 1:
        return Ranked(usual, counts[0], rests, costs)
    each = zip(usual.chunk(len(counts)), counts, strict=True)
    return Classed(tuple(Ranked(own, of_class, costs=costs) for own, of_class in each))


class ChannelCodec(StateCodec):
    """Keeps keys before RoPE and values; packs ``C`` channels of their transform. The last of them may be the
    rests of the first.

    The transform is computed in fp32: its channels differ in size by orders of magnitude.

    Args:
        found: what calibration found of the layer.
        block: tokens of a block.
        counts: for each class of tokens, or of each segment.
    """

    def __init__(self, view: AttentionView, found: Tensors, block: int, counts: Counts) -> None:
        super().__init__(view)
        self.block = block
        self.sink_dtype = torch.float16 if view.dtype.itemsize > 2 else None
        self.mean = found["mean"].to(view.device, view.dtype)  # [W]
        classes = len(counts) if "from_keys" not in found else 1
        self.rests = len(found["usual"]) - classes * len(found["analysis"])
        analysis = found["analysis"].to(view.device, torch.float32)
        self.analysis = F.pad(analysis, (0, 0, 0, self.rests)).contiguous()  # [C, W]
        self.from_keys: Tensor | None = None
        if "from_keys" in found:
            self.from_keys = found["from_keys"].to(view.device, torch.float32).contiguous()
        of_channels, of_costs = self.packed_channels(found, classes)
        usual = of_segments(view, found, of_channels)
        costs = [None] * len(usual) if of_costs is None else of_segments(view, found, of_costs)
        of_classes = [counts[i : i + classes] for i in range(0, len(counts), classes)]
        quantizers = [
            quantizer_of(*each, rests=self.rests) for each in zip(usual, of_classes, costs, strict=True)
        ]
        from_before = [None, self.from_keys]
        self.segments = tuple(
            Segment(each.channels, each, predictor=weight)
            for each, weight in zip(quantizers, from_before, strict=False)
        )

    def packed_channels(self, found: Tensors, classes: int) -> tuple[Tensor, Tensor | None]:
        """The usual scales of all channels that are packed, of one class of tokens after the other; and
        `Ranked.costs`, where errors of tokens are weighed."""
        if "costs" not in found:
            return found["usual"], None
        synthesis = found["synthesis"].float()
        return found["usual"], found["costs"].to(synthesis.device) @ synthesis

    def all_synthesis(self, found: Tensors) -> Tensor:
        """``[W, C]``: that of a rest is that of its channel."""
        return torch.cat([found["synthesis"], found["synthesis"][:, : self.rests]], 1)

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        rows = (features - (self.mean if predicted is None else predicted)).float()
        return by_block(rows, self.analysis, self.block)


class TransformCodec(Rematerialized, ChannelCodec):
    """Keys and values are each a product of the channels, keys of those of the first segment alone, and a
    constant."""

    def __init__(self, view: AttentionView, found: Tensors, block: int, counts: Counts) -> None:
        super().__init__(view, found, block, counts)
        of_keys, of_values = self.all_synthesis(found).tensor_split([view.kv_width])
        of_keys = of_keys[:, : self.segments[0].channels]
        self.key_weight, self.value_weight = (
            each.to(view.device, view.dtype).contiguous() for each in (of_keys, of_values)
        )

    @property
    def key_bias(self) -> Tensor:
        return self.mean[: self.view.kv_width]

    @property
    def value_bias(self) -> Tensor:
        return self.mean[self.view.kv_width :]

    def sources(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        return recalled[..., : self.segments[0].channels], recalled

    def keys(self, source: Tensor) -> Tensor:
        return linear(source, self.key_weight, self.key_bias)

    @property
    def to_states(self) -> tuple[Tensor, Tensor]:
        if "to states" not in self.prepared:
            beside = self.value_weight.shape[1] - self.key_weight.shape[1]
            weight = torch.cat([F.pad(self.key_weight, (0, beside)), self.value_weight])
            self.prepared["to states"] = [weight, self.mean]
        weight, mean = self.prepared["to states"]
        return weight, mean

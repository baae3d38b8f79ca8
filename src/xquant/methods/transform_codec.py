"""The codecs of transform coding: channels of keys and values, predicted or not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models import AttentionView
from ..models.base import linear
from ..quant import Segment
from ..quant.ranked import Ranked
from .codec import by_block
from .cost import RebuildCost
from .key_value import StateCodec
from .rematerialized import Rematerialized

Tensors = dict[str, Tensor]


def channels(view: AttentionView) -> int:
    """``C``: keys and values that come from X alone have no more dimensions than X."""
    width = view.state_width
    return width if view.key_norm is not None else min(width, view.hidden)


def runs(view: AttentionView, found: Tensors) -> list[int]:
    """Of how many channels each segment is: of all, or of those that keys come from and those that only
    values come from."""
    count = len(found["usual"])
    return [view.kv_width, count - view.kv_width] if "from_keys" in found else [count]


class _ChannelCodec(StateCodec):
    """Keeps keys before RoPE and values; packs ``C`` channels of their transform.

    The transform is computed in fp32: its channels differ in size by orders of magnitude.

    Args:
        found: what calibration found of the layer.
        block: tokens of a block.
        counts: of `Ranked`, for each of the `runs` of channels.
    """

    def __init__(
        self, view: AttentionView, found: Tensors, block: int, counts: Sequence[tuple[int, ...]]
    ) -> None:
        super().__init__(view)
        self.block = block
        self.sink_dtype = torch.float16 if view.dtype.itemsize > 2 else None
        self.mean = found["mean"].to(view.device, view.dtype)  # [W]
        self.analysis = found["analysis"].to(view.device, torch.float32).contiguous()  # [C, W]
        self.from_keys: Tensor | None = None
        if "from_keys" in found:
            self.from_keys = found["from_keys"].to(view.device, torch.float32).contiguous()
        usual = found["usual"].split(runs(view, found))
        quantizers = [Ranked(*each) for each in zip(usual, counts, strict=True)]
        told = [None, self.from_keys]
        self.segments = tuple(
            Segment(each.channels, each, told=of_keys)
            for each, of_keys in zip(quantizers, told, strict=False)
        )

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        rows = (features - (self.mean if predicted is None else predicted)).float()
        flat = by_block(rows.flatten(1, 2), self.analysis, self.block)
        return flat.unflatten(1, rows.shape[1:3])


class TransformCodec(Rematerialized, _ChannelCodec):
    """Keys and values are each a product of the channels, keys of those of the first segment alone, and a
    constant."""

    def __init__(
        self, view: AttentionView, found: Tensors, block: int, counts: Sequence[tuple[int, ...]]
    ) -> None:
        super().__init__(view, found, block, counts)
        of_keys, of_values = found["synthesis"].tensor_split([view.kv_width])
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


class PredictedCodec(_ChannelCodec):
    """Carries its own rows and those of the layers below that the layer above is predicted from, side by
    side: ``[B, T, W + W' + ...]``. The lowest layer is predicted from the token alone, or from nothing."""

    feeds_above = True
    accumulated_width: int
    """Their channels."""
    synthesis: Tensor

    def __init__(
        self, view: AttentionView, found: Tensors, block: int, counts: Sequence[tuple[int, ...]]
    ) -> None:
        super().__init__(view, found, block, counts)
        self.synthesis = found["synthesis"].to(view.device, view.dtype).contiguous()  # [W, C]
        self.from_below: Tensor | None = None  # [W, sum of the widths below]
        self.from_token: Tensor | None = None  # [W, E]
        self.reads_below = "predictor" in found
        if "predictor" in found:
            self.from_below = found["predictor"].to(view.device, view.dtype).contiguous()
        if "of_token" in found:
            self.from_token = found["of_token"].to(view.device, view.dtype).contiguous()

    @property
    def carried(self) -> int:
        return self.accumulated_width if self.feeds_above else 0

    def join(self, span: "Sequence[PredictedCodec]", carried: int) -> None:
        """Belong to a ``span`` of layers, bottom up, whose rows are coded together. The last of them carries
        the rows of ``carried`` of its layers: it predicts and recalls these too, itself first."""
        self.span, self.mixes = len(span), True
        self._analyses = [codec.analysis for codec in span]
        self.feeds_above = self is span[-1]
        if self.feeds_above:
            down = span[::-1][:carried]
            self.mean = torch.cat([codec.mean for codec in down])
            self.synthesis = torch.cat([codec.synthesis for codec in down])
            self.from_below = _stacked([codec.from_below for codec in down])
            self.from_token = _stacked([codec.from_token for codec in down])

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        if not self.mixes:
            return super().encode(features, predicted)
        expected = self.mean if predicted is None else predicted
        return (features - expected[..., : self.width]).float()

    def mix(self, encoded: list[Tensor]) -> list[Tensor]:
        rows = torch.cat([each.to(self.view.device) for each in encoded], -1)
        return [
            by_block(rows.to(analysis.device), analysis, self.block) for analysis in self._analyses
        ]

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        return super().rebuild(recalled[..., : self.width])

    def predicted(self, below: Tensor | None, embedded: Tensor | None = None) -> Tensor | None:
        sources = (below, self.from_below), (embedded, self.from_token)
        found: Tensor | None = None
        for known, weight in sources:
            if known is not None and weight is not None:
                part = by_block(known, weight, self.block)
                found = part if found is None else found.add_(part)
        return None if found is None else found.add_(self.mean)

    def recall(self, rows: Tensor, predicted: Tensor | None, sealing: bool = True) -> Tensor:
        own = by_block(rows, self.synthesis, self.block)
        return own.add_(self.mean if predicted is None else predicted)

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        return None  # no kernel attends to predicted rows, so how often they are predicted is not known


def _stacked(weights: Sequence[Tensor | None]) -> Tensor | None:
    """Weights of several layers, one below the other; all of them have one, or none."""
    known = [weight for weight in weights if weight is not None]
    return torch.cat(known) if known else None

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calibration import Calibration
from ..models import AttentionView
from ..models.base import linear
from ..quant.steps import FARTHEST_STEP
from .base import Tensors, option, spans
from .codec import LayerCodec, by_block
from .cost import RebuildCost
from .transform import ChannelCodec, Counts, Transform

EMBEDDED = 256
"""Numbers that are known of every token of the vocabulary, at most."""


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

    name = "tc-cl"
    summary = "as tc, of what a prediction from the layers below leaves over"
    example = "tc-cl-1bit"
    not_causal = "codes layers together"
    narrowest = 0.5
    with_classes: ClassVar[dict[str, Any]] = Transform.with_classes | {"span": 1}

    basis: str = option("joint", "of all heads together, or of each", choices=("joint", "head"))
    reach: int = option(2, "layers below that a layer is predicted from", least=1)
    embedding: bool = option(True, "predict from the token's embedding, too")
    span: int = option(1, "layers that are coded together, at rest", least=1)

    @property
    def causal(self) -> bool:
        return self.span == 1

    @property
    def layers_below(self) -> int:
        return self.reach

    @property
    def layers_together(self) -> int:
        return self.span

    def known(self, views: Sequence[AttentionView]) -> int:
        return min(EMBEDDED, views[0].hidden) if self.embedding and views[0].vocabulary else 0

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        codecs = super().codecs(views, calibration)
        predicted = [codec for codec in codecs if isinstance(codec, PredictedCodec)]
        for i, codec in enumerate(predicted):
            passed = predicted[max(i + 1 - self.reach, 0) : i + 1]
            codec.accumulated_width = sum(each.width for each in passed)
        if self.span > 1:
            for span in spans(predicted, self.span):
                for codec in span:
                    codec.join(span, self.reach if span[-1] is not codecs[-1] else 1)
        codecs[-1].feeds_above = False
        return codecs

    @property
    def weighs_tokens(self) -> bool:
        return super().weighs_tokens and self.span == 1

    def _profiles(self, view: AttentionView, found: Tensors) -> Sequence[Tensor]:
        profiles = super()._profiles(view, found)
        return [F.pad(profile, (0, 1)) for profile in profiles] if self.weighs_tokens else profiles

    def _codec(self, view: AttentionView, found: Tensors, counts: Counts) -> LayerCodec:
        return PredictedCodec(view, found, self.group, counts)


def cost_scale(usual: Tensor, classes: int, rests: int) -> Tensor:
    """Usual scales ``[classes C]`` with that of one more channel in each class, `cost_channel`, before its
    ``rests``: so small that no channel has a lower rank."""
    lowest = usual.new_full((1,), -FARTHEST_STEP)
    return torch.cat([with_costs(each, lowest, rests) for each in usual.chunk(classes)])


def cost_channel(count: int) -> Tensor:
    """`Ranked.costs` ``[count + 1]`` of ``count`` channels and one more, which tells what an error of the
    token costs. That follows from the row, which cannot be told from what a prediction leaves of it."""
    return F.one_hot(torch.tensor(count, device="cpu"), count + 1).float()


def with_costs(channels: Tensor, costs: Tensor, rests: int) -> Tensor:
    """Channels ``[..., C]`` and one more, ``[..., 1]``, before the ``rests`` at their end."""
    count = channels.shape[-1] - rests
    return torch.cat([channels[..., :count], costs, channels[..., count:]], -1)


class PredictedCodec(ChannelCodec):
    """Packs one more channel, which gets no bits, where errors of tokens are weighed: see `cost_channel`.

    Carries its own rows and those of the layers below that the layer above is predicted from, side by
    side: ``[B, T, W + W' + ...]``. The lowest layer is predicted from the token alone, or from nothing."""

    feeds_above = True
    accumulated_width: int
    """Their channels."""
    synthesis: Tensor

    def __init__(self, view: AttentionView, found: Tensors, block: int, counts: Counts) -> None:
        super().__init__(view, found, block, counts)
        synthesis = self.all_synthesis(found)
        self.costs: Tensor | None = None
        if "costs" in found:
            self.costs = found["costs"].to(view.device)[None].contiguous()  # [1, W]
            synthesis = with_costs(synthesis, synthesis.new_zeros(len(synthesis), 1), self.rests)
        self.synthesis = synthesis.to(view.device, view.dtype).contiguous()  # [W, C]
        self.from_below, self.from_token = (  # [W, sum of the widths below] and [W, E]
            found[name].to(view.device, view.dtype).contiguous() if name in found else None
            for name in ("predictor", "of_token")
        )
        self.reads_below = self.from_below is not None

    @property
    def above_width(self) -> int:
        return self.accumulated_width if self.feeds_above else 0

    def join(self, span: "Sequence[PredictedCodec]", passed: int) -> None:
        """Belong to a ``span`` of layers, bottom up, whose rows are coded together. The last of them passes
        the rows of ``passed`` of its layers on: it predicts and recalls these too, its own first."""
        self.span, self.coded_together = len(span), True
        self._analyses = [codec.analysis for codec in span]
        self.feeds_above = self is span[-1]
        if self.feeds_above:
            down = span[::-1][:passed]
            self.mean = torch.cat([codec.mean for codec in down])
            self.synthesis = torch.cat([codec.synthesis for codec in down])
            self.from_below = _stacked([codec.from_below for codec in down])
            self.from_token = _stacked([codec.from_token for codec in down])

    def packed_channels(self, found: Tensors, classes: int) -> tuple[Tensor, Tensor | None]:
        if "costs" not in found:
            return found["usual"], None
        return cost_scale(found["usual"], classes, self.rests), cost_channel(len(found["analysis"]))

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        if self.costs is not None:
            costs = by_block(features.float(), self.costs, self.block)
            return with_costs(super().encode(features, predicted), costs, self.rests)
        if not self.coded_together:
            return super().encode(features, predicted)
        expected = self.mean if predicted is None else predicted
        return (features - expected[..., : self.width]).float()

    def combine(self, encoded: list[Tensor]) -> list[Tensor]:
        rows = torch.cat([each.to(self.view.device) for each in encoded], -1)
        return [by_block(rows.to(analysis.device), analysis, self.block) for analysis in self._analyses]

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        return super().rebuild(recalled[..., : self.width])

    def predicted(
        self, below: Tensor | None, embedded: Tensor | None = None, sealing: bool = True
    ) -> Tensor | None:
        sources = (below, self.from_below), (embedded, self.from_token)
        found: Tensor | None = None
        for known, weight in sources:
            if known is not None and weight is not None:
                part = self._product(known, weight, sealing)
                found = part if found is None else found.add_(part)
        return None if found is None else found.add_(self.mean)

    def recall(self, rows: Tensor, predicted: Tensor | None, sealing: bool = True) -> Tensor:
        own = self._product(rows, self.synthesis, sealing)
        return own.add_(self.mean if predicted is None else predicted)

    def _product(self, rows: Tensor, weight: Tensor, sealing: bool) -> Tensor:
        """One product takes less time than one for each block, where no codes are made from it."""
        return by_block(rows, weight, self.block) if sealing else linear(rows, weight)

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        return None  # no kernel attends to predicted rows, so how often they are predicted is not known


def _stacked(weights: Sequence[Tensor | None]) -> Tensor | None:
    """Weights of several layers, one below the other; all of them have one, or none."""
    known = [weight for weight in weights if weight is not None]
    return torch.cat(known) if known else None

"""The codec of XQuant-CL: what a layer adds to its input."""

import torch
from torch import Tensor

from ..models import AttentionView
from ..models.base import linear
from ..quant import Segment, hadamard
from ..quant.affine import dequantize, quantize
from .codec import AttentionInputs, by_block
from .cost import Accumulator, RebuildCost
from .rematerialized import Rematerialized
from .xquant_cl import XQuantCL
from .xquant_codec import by_range, left_basis


def joint_basis(view: AttentionView) -> Tensor:
    """``U^T`` ``[2 G D, d]`` of ``[W_k W_v]`` (fewer rows where d is smaller)."""
    basis, _ = left_basis(torch.cat([view.key_weight, view.value_weight]))
    return basis


class DeltaCodec(Rematerialized):
    """A layer that adds its decoded delta to the accumulator; the base starts it from nothing."""

    feeds_above = True
    sums_deltas = True

    def __init__(self, view: AttentionView, method: XQuantCL, mha: bool, base: bool) -> None:
        super().__init__(view)
        self.width = view.hidden
        self.block = method.group
        self.reads_below = not base
        self.accumulator = method.accumulator
        self.key_weight, self.value_weight = view.key_weight, view.value_weight
        self.residual = mha if method.stream == "auto" else method.stream == "residual"
        bits = method.first_bits if base else method.bits
        basis = None
        if not mha and not base:
            basis = view.offline("joint", lambda: joint_basis(view))
        if method.rotate and bits < 16:
            size = view.hidden if basis is None else len(basis)
            rotation = hadamard(size).to(view.device, view.dtype)
            basis = rotation if basis is None else rotation @ basis
        self.basis = basis  # [C, d] with orthonormal rows, or None for the identity
        self.synthesis = None if basis is None else basis.T.contiguous()
        channels = view.hidden if basis is None else len(basis)
        quantizer = by_range(method.quantizer(bits, "token", view.dtype), channels)
        self.segments = (Segment(channels, quantizer),)

    def features(self, inputs: AttentionInputs) -> Tensor:
        return inputs.residual if self.residual else inputs.x

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        delta = features if predicted is None else features - predicted
        if self.basis is None:
            return delta
        return by_block(delta.flatten(1, 2), self.basis, self.block).unflatten(1, delta.shape[1:3])

    def recall(self, rows: Tensor, predicted: Tensor | None, sealing: bool = True) -> Tensor:
        if self.synthesis is None:
            return rows if predicted is None else predicted + rows
        delta = (
            by_block(rows, self.synthesis, self.block) if sealing else linear(rows, self.synthesis)
        )
        return delta if predicted is None else delta.add_(predicted)

    def accumulate(self, recalled: Tensor) -> Tensor:
        if self.accumulator == 16:
            return recalled
        packed = quantize(recalled, self.accumulator, -1, self.block)
        return dequantize(*packed, -1, self.block, torch.empty_like(recalled))

    def sources(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        x = self.view.normalize(recalled) if self.residual else recalled
        return x, x

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        size = self.view.dtype.itemsize
        bits = 8 * size if self.accumulator == 16 else self.accumulator
        moved = self.width * size * (self.reads_below + self.feeds_above)
        accumulator = Accumulator(self.width, self.width * bits / 8, moved)
        return RebuildCost(self.key_weight, self.value_weight, self.synthesis, accumulator)

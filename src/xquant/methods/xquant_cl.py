from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import Calibration
from ..models import AttentionView
from ..models.base import linear
from ..quant import Segment, hadamard
from ..quant.affine import dequantize, quantize
from .base import BITS, QuantizedMethod, option
from .codec import AttentionInputs, LayerCodec, Rematerialized, by_block
from .cost import Accumulator, RebuildCost
from .xquant import FORMS, XQuant, by_range, is_mha, left_basis


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

    name = "xquant-cl"
    paper = "XQuant-CL, arXiv 2508.10395"
    summary = "deltas of X between layers on an accumulator; K and V rematerialized"
    example = "xquant-cl-2bit"

    first_layers: int = option(3, "lowest layers given first_bits; the last is the base", least=1)
    form: str = option("auto", "deltas of X (mha) or their latents (gqa)", choices=FORMS)
    stream: str = option(
        "auto",
        "deltas of post-norm X, or of the residual stream with the norm recomputed;"
        " auto is residual for mha and post for gqa",
        choices=("auto", "post", "residual"),
    )
    accumulator: int = option(16, "bits of the accumulator e_b, 16 is full", choices=BITS)
    rotate: bool = option(False, "rotate deltas before quantizing")

    @property
    def built_from_weights(self) -> bool:
        return True

    def codecs(
        self, views: Sequence[AttentionView], calibration: Calibration | None = None
    ) -> list[LayerCodec]:
        if self.first_layers > len(views):
            raise ValueError(
                f"xquant-cl: first_layers={self.first_layers} but only {len(views)} layers are"
                " compressed in this model"
            )
        lower = XQuant(bits=self.first_bits, group=self.group, form=self.form, rotate=self.rotate)
        codecs: list[LayerCodec] = []
        for i, view in enumerate(views):
            if i < self.first_layers - 1:
                codecs.append(lower.codec(view, i, {}))
            else:
                base = i == self.first_layers - 1
                codecs.append(DeltaCodec(view, self, is_mha(self.form, view), base))
        codecs[-1].feeds_above = False
        return codecs


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
        return delta if self.basis is None else by_block(delta, self.basis, self.block)

    def recall(self, rows: Tensor, predicted: Tensor | None, sealing: bool = True) -> Tensor:
        if self.synthesis is None:
            return rows if predicted is None else predicted + rows
        block = self.block
        delta = by_block(rows, self.synthesis, block) if sealing else linear(rows, self.synthesis)
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

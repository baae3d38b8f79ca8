from dataclasses import dataclass

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Affine, Plain, Quantizer, Segment, hadamard
from ..threads import one_thread
from .base import LayeredMethod, Tensors, option
from .codec import AttentionInputs, LayerCodec, Rematerialized, by_block
from .widths import Widths

FORMS = ("auto", "mha", "gqa")


@dataclass(frozen=True, kw_only=True)
class XQuant(LayeredMethod):
    """XQuant (arXiv 2508.10395, sections 3.1 and 3.3.1): cache the layer input, rebuild K and V.

    MHA stores post-norm X per token: ``n d b / 8 + 4 n ceil(d / g)`` bytes a block of n = g tokens
    and layer. GQA stores the latents X U_k per channel and X U_v per token, which takes what `kivi`
    takes.

    Differs from the paper: nothing by default. ``rotate`` multiplies X (MHA) or X U_v (GQA) by an
    orthogonal matrix before quantizing; ``outlier=true`` is the paper's Table B.1.

    Examples:
        >>> from xquant import KVCache, XQuant
        >>> cache = KVCache(model, XQuant(bits=4, sink=1))  # or "xquant-4bit:sink=1"
        >>> _ = model(**prompt, cache=cache)
        >>> cache.report().codec_bytes > 0  # the bases of the latents
        True
    """

    name = "xquant"
    paper = "XQuant, arXiv 2508.10395"
    summary = "layer input X (MHA) or its SVD latents (GQA); K and V rematerialized"
    example = "xquant-4bit"

    form: str = option("auto", "store X (mha) or its latents (gqa)", choices=FORMS)
    rotate: bool = option(False, "rotate rows before quantizing per token")
    outlier: bool = option(False, "keep the first channel of X U_k in fp16 (gqa form)")

    @property
    def built_from_weights(self) -> bool:
        return True

    def codec(self, view: AttentionView, position: int, found: Tensors) -> LayerCodec:
        mha = is_mha(self.form, view)
        if self.outlier and mha:
            raise ValueError("xquant: outlier=true needs the gqa form (ask for it with form=gqa)")
        bits = self.layer_widths(position)
        if not mha:
            return LatentCodec(view, self, bits)
        if bits.keys != bits.values:
            raise ValueError(f"xquant: layers={self.layers} tells keys from values, which both come from X")
        return InputCodec(view, self, bits.keys)


def is_mha(form: str, view: AttentionView) -> bool:
    """The form to use for a layer: as asked for, or by its head counts."""
    return view.multi_head if form == "auto" else form == "mha"


@one_thread()
def left_basis(weight: Tensor) -> tuple[Tensor, Tensor]:
    """SVD of ``W = U S B^T`` given ``W^T`` ``[out, d]``: ``U^T`` ``[r, d]`` and ``(S B^T)^T`` ``[out, r]``.

    ``r = min(out, d)``; computed in fp64 and returned in the dtype of ``weight``.
    """
    b, s, ut = torch.linalg.svd(weight.double(), full_matrices=False)
    return ut.to(weight.dtype).contiguous(), (b * s).to(weight.dtype).contiguous()


def latent_bases(view: AttentionView) -> tuple[Tensor, tuple[int, int], Tensor, Tensor]:
    """Both bases under each other, the ranks of each, and the fused weights of keys and values."""
    key_basis, key_weight = left_basis(view.key_weight)
    value_basis, value_weight = left_basis(view.value_weight)
    split = len(key_basis), len(value_basis)
    return torch.cat([key_basis, value_basis]), split, key_weight, value_weight


def by_range(quantizer: Quantizer, channels: int) -> Quantizer:
    """``quantizer`` per token with its codes in tiles of a range each, where ranges are of one size."""
    if isinstance(quantizer, Affine) and channels % quantizer.range_size(channels) == 0:
        return quantizer.tiled(quantizer.range_size(channels), "tokens")
    return quantizer


class _FromInput(Rematerialized):
    """Keeps post-norm X of a token, whatever form it is packed in."""

    def features(self, inputs: AttentionInputs) -> Tensor:
        return inputs.x

    def exact(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.view.project(features)


class InputCodec(_FromInput):
    """The MHA form: post-norm X, per token."""

    def __init__(self, view: AttentionView, method: XQuant, bits: int) -> None:
        super().__init__(view)
        self.width = view.hidden
        self.segments = (
            Segment(view.hidden, by_range(method.quantizer(bits, "token", view.dtype), view.hidden)),
        )
        self.block = method.group
        self.rotation: Tensor | None = None
        self.key_weight, self.value_weight = view.key_weight, view.value_weight
        if method.rotate and bits < 16:
            self.rotation = hadamard(view.hidden).to(view.device, view.dtype)
            # K = (X R) (R^T W_k): the inverse rotation is fused into the projections.
            self.key_weight = (self.key_weight @ self.rotation).contiguous()
            self.value_weight = (self.value_weight @ self.rotation).contiguous()

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        if self.rotation is None:
            return features
        return by_block(features, self.rotation, self.block)


class LatentCodec(_FromInput):
    """The GQA form: X U_k per channel and X U_v per token; the fused S B^T bring K and V back."""

    def __init__(self, view: AttentionView, method: XQuant, bits: Widths) -> None:
        super().__init__(view)
        self.width = view.hidden
        self.block = method.group
        # basis [r_k + r_v, d]: the rows of U_k^T, then of U_v^T
        self.basis, self.split, self.key_weight, self.value_weight = view.offline(
            "latents", lambda: latent_bases(view)
        )
        if method.rotate and bits.values < 16:
            rotation = hadamard(self.split[1]).to(view.device, view.dtype)
            key_basis, value_basis = self.basis.split(self.split)
            self.basis = torch.cat([key_basis, rotation @ value_basis])
            self.value_weight = (self.value_weight @ rotation).contiguous()
        quantizer = method.quantizer(bits.keys, "channel", view.dtype).tiled(self.split[0], "tokens")
        keys = [Segment(self.split[0], quantizer)]
        if method.outlier:
            keys = [
                Segment(1, Plain(torch.float16)),
                Segment(self.split[0] - 1, method.quantizer(bits.keys, "channel", view.dtype)),
            ]
        quantizer = method.quantizer(bits.values, "token", view.dtype).tiled(self.split[1], "channels")
        values = Segment(self.split[1], quantizer)
        self.segments = (*keys, values)

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        return by_block(features, self.basis, self.block)

    def sources(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = recalled.split(self.split, -1)
        return key, value

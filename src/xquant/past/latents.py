"""LatentsOfStates: the GQA form of `xquant` where only keys and values are given, not what they are made of.

With ``W = U S B^T``, keys before RoPE are ``k = x W + b`` and their latents ``x U = (k - b) B S^-1``: what
comes back of them is ``(x U) (S B^T) + b``. So a layer that sees keys and values can pack latents, where the
projection has the rank of its outputs.
"""

import torch
from torch import Tensor

from ..methods.codec import Rematerialized, by_block
from ..methods.key_value import StateCodec
from ..methods.xquant import LatentCodec


class LatentsOfStates(Rematerialized, StateCodec):
    """Keeps keys before RoPE and values, and packs the latents of a `LatentCodec`.

    Raises:
        ValueError: keys cannot be taken back to latents.
    """

    def __init__(self, latents: LatentCodec) -> None:
        super().__init__(latents.view)
        if latents.view.key_norm is not None:
            raise ValueError("keys are normalized, and latents cannot be had of them")
        if max(latents.split) > latents.view.kv_width:
            raise ValueError("there are more latents than channels")
        self.segments, self.split, self.block = latents.segments, latents.split, latents.block
        self.key_weight, self.value_weight = latents.key_weight, latents.value_weight
        weights = self.key_weight, self.value_weight  # [G*D, r]
        # On the meta device there are no numbers.
        self._inverses = [w.mT if w.is_meta else torch.linalg.pinv(w.float()) for w in weights]

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        states = features.flatten(1, 2).split(self.view.kv_width, -1)
        biases = self.key_bias, self.value_bias
        parts = [
            by_block((part if bias is None else part - bias).float(), inverse, self.block)
            for part, bias, inverse in zip(states, biases, self._inverses, strict=True)
        ]
        return torch.cat(parts, -1).to(features.dtype).unflatten(1, features.shape[1:3])

    def sources(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = recalled.split(self.split, -1)
        return key, value

"""The codec of methods that rotate every head before they quantize it: QuaRot, TurboQuant and others."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Quantizer, hadamard
from .codec import by_block
from .key_value import KeyValueCodec

SEED = 20260101


def random_hadamard(size: int) -> Tensor:
    """A Hadamard matrix whose columns have random signs, the same ones for every head: orthogonal,
    ``[size, size]`` in fp32."""
    generator = torch.Generator().manual_seed(SEED)
    return hadamard(size) * (torch.randint(2, (size,), generator=generator) * 2 - 1)


class RotatedCodec(KeyValueCodec):
    """Keeps keys and values as they are, and packs each head times a matrix.

    Args:
        keys, values: the quantizers of rotated heads.
        turn: gives an orthogonal matrix ``[D, D]`` for heads of size ``D``.
        block: tokens whose heads are rotated in one product.
    """

    packs_states = False

    def __init__(
        self,
        view: AttentionView,
        keys: Quantizer,
        values: Quantizer,
        rope: str,
        turn: Callable[[int], Tensor],
        block: int,
    ) -> None:
        super().__init__(view, keys, values, rope)
        self.offset = None
        self.key_rotation = turn(view.head_size).to(view.device, torch.float32)
        self.value_rotation = turn(view.value_size).to(view.device, torch.float32)
        self._block = block

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        key, value = self.exact(features.flatten(1, 2))
        turned = self._turned(key, self.key_rotation), self._turned(value, self.value_rotation)
        return torch.cat(turned, -1).unflatten(1, features.shape[1:3])

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.exact(recalled)
        return self._turned(key, self.key_rotation.T), self._turned(value, self.value_rotation.T)

    def _turned(self, states: Tensor, rotation: Tensor) -> Tensor:
        """States ``[B, T, G*D]`` with every head ``h`` replaced by ``rotation @ h``; a block at a time, so
        that codes do not depend on how many come together."""
        size = len(rotation)
        heads = states.float().unflatten(-1, (-1, size))
        turned = by_block(heads.flatten(1, 2), rotation, self._block * heads.shape[2])
        return turned.view_as(heads).flatten(2).to(states.dtype)

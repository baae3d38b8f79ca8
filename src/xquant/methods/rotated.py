"""The codec of methods that rotate every head before they quantize it: QuaRot, TurboQuant and others."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Quantizer, hadamard
from .codec import Rotations, by_block
from .key_value import KeyValueCodec

SEED = 20260101
WIDEST = 128
"""Channels that share a range, where a method has them in groups: those of its paper."""


def random_hadamard(size: int) -> Tensor:
    """A Hadamard matrix whose columns have random signs, the same ones for every head: orthogonal,
    ``[size, size]`` in fp32."""
    generator = torch.Generator().manual_seed(SEED)
    return hadamard(size) * (torch.randint(2, (size,), generator=generator, device="cpu") * 2 - 1)


def both(view: AttentionView, matrix: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """The matrices of one kind for the key heads and the value heads of a layer."""
    return matrix(view.head_size), matrix(view.value_size)


def range_channels(head: int) -> int:
    """Channels of a head that share a range: all, or equal parts of at most 128 where there are such."""
    parts = -(-head // WIDEST)
    return head // parts if head % parts == 0 else head


class RotatedCodec(KeyValueCodec):
    """Keeps keys and values as they are, and packs each head times a matrix.

    Args:
        keys, values: the quantizers of rotated heads.
        rotations: see `Rotations`.
        block: tokens whose heads are rotated in one product.
    """

    def __init__(
        self,
        view: AttentionView,
        keys: Quantizer,
        values: Quantizer,
        rope: str,
        rotations: Rotations,
        block: int,
    ) -> None:
        super().__init__(view, keys, values, rope)
        if rotations[0] is not None:
            self.offset = None
        self.key_rotation, self.value_rotation = (
            None if matrix is None else matrix.to(view.device, torch.float32) for matrix in rotations
        )
        self._block = block

    @property
    def rotations(self) -> Rotations:
        return self.key_rotation, self.value_rotation

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        rows = super().encode(features, predicted)
        key, value = self.exact(rows.flatten(1, 2))
        return torch.cat(self.rotate(key, value), -1).unflatten(1, features.shape[1:3])

    def rotate(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What is packed of keys and values ``[B, T, G*D]``."""
        return self._product(key, self.key_rotation), self._product(value, self.value_rotation)

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key_back, value_back = (None if matrix is None else matrix.mT for matrix in self.rotations)
        key, value = super().rebuild(recalled)  # there is no offset where keys are rotated
        return self._product(key, key_back), self._product(value, value_back)

    def _product(self, states: Tensor, rotation: Tensor | None) -> Tensor:
        """States ``[B, T, G*D]`` with every head ``h`` replaced by ``rotation @ h``; a block at a time, so
        that codes do not depend on how many come together."""
        if rotation is None:
            return states
        heads = states.float().unflatten(-1, (-1, rotation.shape[-1]))
        if rotation.dim() == 2:
            rows = by_block(heads, rotation, self._block * heads.shape[2]).flatten(2)
        else:
            pairs = zip(heads.unbind(2), rotation, strict=True)
            rows = torch.cat([by_block(head, own, self._block) for head, own in pairs], -1)
        return rows.to(states.dtype)

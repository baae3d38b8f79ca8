"""The codec of OSCAR, and the matrices that it turns heads by."""

import torch
from torch import Tensor

from ..models import AttentionView
from ..quant import Quantizer, hadamard
from .rotated import RotatedCodec


class OscarCodec(RotatedCodec):
    """Turns heads, and clips what is far out of each.

    Args:
        turns: of key heads and of value heads, see `spread`.
        shares: of the magnitudes of a turned head that are not clipped, of keys and of values.
    """

    def __init__(
        self,
        view: AttentionView,
        keys: Quantizer,
        values: Quantizer,
        turns: tuple[Tensor, Tensor],
        shares: tuple[float, float],
        block: int,
    ) -> None:
        super().__init__(view, keys, values, "post", turns, block)
        self._shares = shares

    def turned(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.view.by_head(super().turned(key, value))
        of_keys, of_values = self._shares
        return clipped(key, of_keys).flatten(-2), clipped(value, of_values).flatten(-2)


def clipped(heads: Tensor, share: float) -> Tensor:
    """Heads ``[..., D]`` where no number is larger than the magnitude below which lie ``share`` of those of
    its head."""
    size = heads.shape[-1]
    place = min(int(share * size), size - 1)
    if place == size - 1:
        return heads
    most = heads.abs().sort(-1).values[..., place : place + 1]
    return heads.clamp(-most, most)


def spread(covariance: Tensor) -> Tensor:
    """The orthogonal matrix, fp32 ``[D, D]``, that heads of a ``covariance`` are multiplied with: its
    eigenvectors, then a Hadamard matrix, then channels in the bit-reversed order of the eigenvalues, the
    largest first."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT).double() / 2)
    mixed = vectors @ hadamard(len(values)).to(vectors)
    order = torch.empty_like(values, dtype=torch.long)
    order[bit_reversed(len(values)).to(order.device)] = values.argsort(descending=True)
    return mixed[:, order].T.float().clamp(-1, 1)


def bit_reversed(size: int) -> Tensor:
    """The numbers below ``size`` by their bits read backwards: ``[0, 4, 2, 6, 1, 5, 3, 7]`` for 8."""
    width = (size - 1).bit_length()
    return torch.tensor(sorted(range(size), key=lambda i: f"{i:0{width}b}"[::-1]), device="cpu")

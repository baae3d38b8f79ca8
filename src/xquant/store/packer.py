"""Packer: what turns blocks into codes and back, in torch or by a backend."""

from typing import Any

from torch import Tensor

from ..quant import Packed, Quantizer


class Packer:
    """Packs blocks as their quantizers do, in torch.

    A backend overrides it where it is faster. What it packs must have the same bytes, but for the sign of a
    zero, which torch leaves to the order in which it looks for the lowest.
    """

    def pack(self, quantizer: Quantizer, x: Tensor, excluded: Tensor | None) -> Packed:
        """`Quantizer.encode` of blocks ``[N, n, C]``; ``excluded`` is bool ``[N, n]``.

        Raises:
            ValueError: ``x`` holds NaN in a token that sets a range.
        """
        return quantizer.encode(x, excluded)

    def unpack(self, quantizer: Quantizer, packed: Packed, out: Tensor) -> None:
        """`Quantizer.decode` into ``out`` ``[N, n, C]``, which may be some columns of a tensor."""
        quantizer.decode(packed, out)

    def joins(self, quantizer: Quantizer, x: Tensor) -> bool:
        """Whether it is faster to pack ``x`` together with the same blocks of other layers: each call is a
        launch on a GPU. On a CPU they would be copied for nothing."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packer":
        """It holds nothing of a cache: copies share it."""
        return self


TORCH = Packer()

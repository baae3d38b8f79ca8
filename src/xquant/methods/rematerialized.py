"""Rematerialized: keys and values that are projected again from what is kept (arXiv 2508.10395)."""

from torch import Tensor

from ..models.base import linear
from .codec import LayerCodec
from .cost import RebuildCost


class Rematerialized(LayerCodec):
    """Keys and values are each a product of what is kept with a matrix; ``W`` features of a token, of
    which keys come from ``Ck`` numbers and values from ``Cv``."""

    key_weight: Tensor
    """``[G*D, Ck]``."""
    value_weight: Tensor
    """``[G*D, Cv]``."""

    @property
    def rematerialized(self) -> "Rematerialized":
        return self

    @property
    def key_bias(self) -> Tensor | None:
        """What is added to the product for keys, ``[G*D]``."""
        return self.view.key_bias

    @property
    def value_bias(self) -> Tensor | None:
        """What is added to the product for values, ``[G*D]``."""
        return self.view.value_bias

    def sources(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """What the matrices are multiplied with, ``[B, T, Ck]`` and ``[B, T, Cv]``."""
        return recalled, recalled

    def keys(self, source: Tensor) -> Tensor:
        """Keys before RoPE ``[B, T, G*D]``."""
        return self.view.finish_keys(linear(source, self.key_weight, self.key_bias))

    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.sources(recalled)
        return self.keys(key), linear(value, self.value_weight, self.value_bias)

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        return RebuildCost(keys=self.key_weight, values=self.value_weight)

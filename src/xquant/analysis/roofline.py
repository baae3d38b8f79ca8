"""How far rematerialization is free: XQuant's system-level analysis (arXiv 2508.10395, section 3.4).

Rebuilding keys and values of ``l`` tokens of context takes arithmetic, reading them and the weights takes
bandwidth. Up to some ``l`` a GPU is done with the first before the second. A multiply-accumulate is two
FLOPs.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from .memory import CacheLayout


@dataclass(frozen=True)
class Load:
    """What a decoding step does in all layers.

    ``flops`` of rematerialization and ``nbytes`` read from the cache, both of one token of context;
    ``weights`` bytes read whatever the context.
    """

    flops: float
    nbytes: float
    weights: float

    def memory_bound_context(self, ridge: float) -> float:
        """Tokens up to which memory is the bottleneck of a GPU with this ridge point (FLOPs a byte)."""
        excess = self.flops - ridge * self.nbytes
        return ridge * self.weights / excess if excess > 0 else math.inf


def layout_load(layout: CacheLayout) -> Load | None:
    """The load of a method on a model: real layers, with the ranges of codes and the weights as they are.

    None for methods that rebuild nothing, or do not say what it takes. As in the paper the products that
    rebuild keys and values count, those of the rest of the layer do not, and XQuant-CL reads its accumulator
    in every layer.
    """
    flops, nbytes, weights = 0.0, layout.block.total() / layout.method.group, 0
    for codec in layout.codecs:
        cost = codec.rebuild_cost
        if cost is None or not cost.matrices:
            return None
        if cost.accumulator is not None:
            flops += 2 * cost.accumulator.channels
            nbytes += cost.accumulator.nbytes
        flops += sum(2 * matrix.numel() for matrix in cost.matrices)
        weights += layout.skeleton.layer_nbytes(codec.view.index)
        weights += sum(t.nbytes for t in codec.added if _among(t, cost.matrices))
    return Load(flops, nbytes, weights)


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)

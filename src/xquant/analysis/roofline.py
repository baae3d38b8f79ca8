"""How far rematerialization is free: XQuant's system-level analysis (arXiv 2508.10395, section 3.4), and the
least that the attention of a decoding step takes.

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


@dataclass(frozen=True)
class Attention:
    """What the attention of one new token must do in all layers at least: bytes to move, each once, and
    FLOPs."""

    nbytes: float
    flops: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        """The least time, given bytes and FLOPs a second."""
        return max(self.nbytes / bandwidth, self.flops / rate)


def attention_step(layout: CacheLayout, context: int, batch: int) -> Attention | None:
    """The attention of a decoding step over ``batch`` sequences of ``context`` tokens.

    Kernels rebuild keys once for all query heads, and sum values before their product. They read the
    matrices, and the cache but for its index; where layers store deltas, every layer also reads the
    accumulator and writes it. Projecting the few tokens that are kept exactly does not count. None for
    methods that do not say what rebuilding takes.
    """
    held = layout.count(context, batch)
    flops, nbytes = 0.0, float(held.total - held.index - held.skipped)
    sealed = max((context - layout.method.tail) // layout.method.group, 0) * layout.method.group
    for codec in layout.codecs:
        cost = codec.rebuild_cost
        if cost is None:
            return None
        heads, size = codec.view.query_heads, codec.view.head_size
        over_heads = 2 * heads * size  # a product with each query
        flops += batch * context * over_heads  # scores
        nbytes += sum(matrix.nbytes for matrix in cost.matrices)
        for matrix in (cost.keys, cost.rows):
            if matrix is not None:
                flops += batch * sealed * 2 * matrix.numel()
        if cost.accumulator is not None:
            flops += batch * sealed * 2 * cost.accumulator.channels
            nbytes += batch * sealed * cost.accumulator.moved
        if cost.values is None:
            flops += batch * context * over_heads
        else:
            summed = cost.values.shape[1]
            flops += batch * sealed * 2 * heads * summed
            flops += batch * (context - sealed + summed) * over_heads  # what is exact, and the sums
    return Attention(nbytes, flops)


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)

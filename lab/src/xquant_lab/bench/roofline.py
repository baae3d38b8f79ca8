"""The least that the attention of a decoding step takes. A multiply-accumulate is two FLOPs."""

from dataclasses import dataclass

from xquant.analysis.memory import CacheLayout


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

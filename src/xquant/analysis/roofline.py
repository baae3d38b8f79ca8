"""How far rematerialization is free: XQuant's system-level analysis (arXiv 2508.10395, section 3.4), and the
least that the attention of a decoding step takes.

Rebuilding keys and values of ``l`` tokens of context takes arithmetic, reading them and the weights takes
bandwidth. Up to some ``l`` a GPU is done with the first before the second. A multiply-accumulate is two
FLOPs.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ..methods.key_value import StateCodec
from ..methods.rematerialized import Rematerialized
from ..methods.xquant_cl import DeltaCodec
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


def mha_load(hidden: int, bits: float) -> Load:
    """One layer by equation 3: Llama-2's 12 d^2 weights in 16 bits, X in ``bits`` without ranges."""
    return Load(2 * 2 * hidden**2, bits / 8 * hidden, 2 * 12 * hidden**2)


def gqa_load(hidden: int, sharing: int, bits: float) -> Load:
    """One layer by equation 4: Llama-3.1's 13 d^2 weights and the fused ones, ``sharing`` query heads to a
    key/value head.

    As printed: it reads one latent of ``hidden / sharing`` channels, where the text above it has two.
    """
    width = hidden / sharing
    return Load(2 * 2 * width**2, bits / 8 * width, 2 * 13 * hidden**2 + 2 * 2 * width**2)


def layout_load(layout: CacheLayout) -> Load | None:
    """The same for a method on a model: real layers, with the ranges of codes and the weights as they are.

    None for methods that keep keys and values. As in the paper the products that rebuild keys and values
    count, those of the rest of the layer do not, and XQuant-CL reads its accumulator in every layer.
    """
    flops, nbytes, weights = 0.0, layout.block.total() / layout.method.group, 0
    for codec in layout.codecs:
        if not isinstance(codec, Rematerialized):
            return None
        products = [codec.key_weight, codec.value_weight]
        if isinstance(codec, DeltaCodec):
            products += [] if codec.synthesis is None else [codec.synthesis]
            flops += 2 * codec.width  # adding the delta
            nbytes += codec.width * _accumulator_bits(codec) / 8
        flops += sum(2 * matrix.numel() for matrix in products)
        weights += layout.skeleton.layer_nbytes(codec.view.index)
        weights += sum(t.nbytes for t in codec.added if _among(t, products))
    return Load(flops, nbytes, weights)


@dataclass(frozen=True)
class Attention:
    """What the attention of one new token must do in all layers, and no more than once: ``nbytes`` to move,
    ``flops``."""

    nbytes: float
    flops: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        """The least time, given bytes and FLOPs a second."""
        return max(self.nbytes / bandwidth, self.flops / rate)


def attention_step(layout: CacheLayout, context: int, batch: int) -> Attention | None:
    """The attention of a decoding step over ``batch`` sequences of ``context`` tokens.

    As `kernels.rebuilt` goes about it: keys are rebuilt once for all query heads, values are summed before
    their product. Read are the cache, but for its index, and the matrices; where layers store deltas, every
    layer also reads the sum of those below and writes its own. To project the few tokens that are kept
    exactly does not count. None for methods that predict layers otherwise.
    """
    held = layout.count(context, batch)
    flops, nbytes = 0.0, float(held.total - held.index - held.skipped)
    sealed = max((context - layout.method.tail) // layout.method.group, 0) * layout.method.group
    for codec in layout.codecs:
        view = codec.view
        over_heads = 2 * view.query_heads * view.head_size  # a product with each query
        flops += batch * context * over_heads  # scores
        if not isinstance(codec, Rematerialized | StateCodec) or (
            codec.feeds_above and not isinstance(codec, DeltaCodec)
        ):
            return None
        if not isinstance(codec, Rematerialized):
            flops += batch * context * over_heads
            continue
        sources = codec.value_weight.shape[1]
        products = [codec.key_weight]
        if isinstance(codec, DeltaCodec):
            products += [] if codec.synthesis is None else [codec.synthesis]
            flops += batch * sealed * 2 * codec.width  # adding the delta
            row = codec.width * view.dtype.itemsize
            nbytes += batch * sealed * row * (codec.reads_below + codec.feeds_above)
        flops += batch * sealed * sum(2 * matrix.numel() for matrix in products)
        flops += batch * sealed * 2 * view.query_heads * sources
        flops += batch * (context - sealed + sources) * over_heads  # what is exact, and the sums
        nbytes += sum(matrix.nbytes for matrix in [*products, codec.value_weight])
    return Attention(nbytes, flops)


def _accumulator_bits(codec: DeltaCodec) -> int:
    return 8 * codec.view.dtype.itemsize if codec.accumulator == 16 else codec.accumulator


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)

"""What a codec is: one layer's way from what a model gives a cache to packed rows, and back.

A method builds one for each compressed layer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models import AttentionView
from ..models.base import linear
from ..quant import Packed, Segment
from .cost import RebuildCost

Rotations = tuple[Tensor | None, Tensor | None]
"""Orthogonal matrices of key heads and of value heads: fp32 ``[D, D]``, or ``[G, D, D]`` with one for each
head; None where heads stay as they are. A query that is rotated by the matrix of the keys has the
same scores with rotated keys, and a sum of rotated values is rotated back once."""


@dataclass
class AttentionInputs:
    """What one attention layer is given of ``T`` new tokens, and what it makes of them for its cache."""

    x: Tensor  # post-norm input [B, T, d]
    residual: Tensor  # input of the norm [B, T, d]
    raw_key: Tensor  # output of the key projection, before norm and RoPE [B, T, G*D]
    key: Tensor  # as the model gives it to a cache, rotated [B, G, T, D]
    value: Tensor  # [B, G, T, D]

    def last(self, count: int) -> "AttentionInputs":
        """The newest ``count`` tokens of it."""
        if count == self.x.shape[1]:
            return self
        x, residual, raw_key = (t[:, -count:] for t in (self.x, self.residual, self.raw_key))
        return AttentionInputs(x, residual, raw_key, self.key[:, :, -count:], self.value[:, :, -count:])


class LayerCodec(ABC):
    """One layer's way from features to packed rows to keys and values.

    Letters: ``W`` channels of a feature row, ``C`` channels of a packed row, ``n`` tokens of a block.
    """

    segments: tuple[Segment, ...]
    width: int
    """``W``."""
    reads_below: bool = False
    """Whether `encode` and `recall` need what the layer below has accumulated."""
    feeds_above: bool = False
    """Whether the layer above needs what this layer accumulates."""
    rotated: bool = False
    """Whether keys are stored after RoPE."""
    keeps_states: bool = False
    """Whether features are keys (before RoPE unless `rotated`) and values as they are, side by side: other
    caches can then be converted to it."""
    packs_states: bool = False
    """Whether the segments are keys, less `offset`, and values, of each head times `rotations`."""
    offset: Tensor | None = None
    """What is taken off every key before it is packed, ``[G*D]``."""
    embedding: Tensor | None = None
    """What is known of every token of the vocabulary, ``[V, E]``: of the lowest layer's codec, for all. None
    where nothing is predicted from a token's id."""
    sums_deltas: bool = False
    """Whether `recall` adds decoded rows, times `synthesis` where there is one, to what the layer below has
    accumulated."""
    synthesis: Tensor | None = None
    """What decoded rows are multiplied with, ``[W, C]``."""
    span: int = 1
    """Layers, this one the lowest, that are sealed together, see `merge`."""
    coded_together: bool = False
    """Whether what a layer of the span packs is made of the rows of all its layers, see `combine`. Their past
    can be read once a forward pass has come to the last of them, and never with ``attend="store"``."""
    source: int = 0
    """The layer of the span whose codes the segments of the others share."""
    sink_dtype: torch.dtype | None = None
    """Of sealed sinks; None where they keep that of the features."""
    calibrated: str = ""
    """The digest of the calibration that it was built with; empty without one."""

    def __init__(self, view: AttentionView) -> None:
        self.view = view
        # Without RoPE, keys before and after RoPE are the same.
        self.rotated = type(self).rotated or not view.rotary_size
        self.prepared: dict[str, list[Tensor]] = {}  # by kernels, for all caches

    @property
    def rotations(self) -> Rotations:
        """What heads are multiplied with before they are packed."""
        return None, None

    @property
    def rematerialized(self) -> "Rematerialized | None":
        """The codec itself where keys and values are products of what is packed."""
        return None

    @property
    def to_states(self) -> tuple[Tensor, Tensor] | None:
        """What makes keys and values, side by side, of what is recalled, where one product does: its matrix
        ``[W, C]``, and what is added ``[W]``."""
        return None

    @property
    def above_width(self) -> int:
        """Channels of a token that go from this layer to the one above."""
        return self.width if self.feeds_above else 0

    @property
    def tail_width(self) -> int:
        """Numbers kept of a recent token: its features, and where they are something else its keys and
        values, which a step would otherwise have to build."""
        return self.width + (0 if self.keeps_states else self.view.state_width)

    @property
    def added(self) -> list[Tensor]:
        """The weights that the codec adds to the model's own (bases, fused projections)."""
        tensors = [*vars(self).values(), *(t for ts in self.prepared.values() for t in ts)]
        own = {id(t): t for t in tensors if isinstance(t, Tensor)}
        model = [t.untyped_storage() for t in self.view.weights]
        # Not by address: on the meta device all are 0.
        return [t for t in own.values() if all(t.untyped_storage() is not s for s in model)]

    @property
    def nbytes(self) -> int:
        """Bytes of `added`; of views, those of what they show parts of."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self.added}
        return sum(storage.nbytes() for storage in storages.values())

    @abstractmethod
    def features(self, inputs: AttentionInputs) -> Tensor:
        """The rows to keep, ``[B, T, W]``: copies or elementwise functions of ``inputs``, so that
        a token's row does not depend on which tokens came with it."""

    def predicted(
        self, below: Tensor | None, embedded: Tensor | None = None, sealing: bool = True
    ) -> Tensor | None:
        """What the features of tokens ``[B, T, W]`` are predicted to be, from what the layer below has
        accumulated of them, and from their rows of `embedding` ``[B, T, E]``; None where there is neither.
        When ``sealing`` it must not depend on which blocks come together."""
        return below

    def encode(self, features: Tensor, predicted: Tensor | None) -> Tensor:
        """Rows to pack, ``[B, m, n, C]``, of ``m`` blocks of features ``[B, m, n, W]`` that were `predicted`
        to be something, of the same shape."""
        return features

    def combine(self, encoded: list[Tensor]) -> list[Tensor]:
        """What the layers of the span pack, ``[N, n, C]`` each, from what each of them has encoded."""
        return encoded

    def merge(self, packed: list[list[Packed]]) -> list[list[Packed]]:
        """What the layers of the span store, from what each packed of the same tokens by itself."""
        return packed

    def recall(self, rows: Tensor, predicted: Tensor | None, sealing: bool = True) -> Tensor:
        """What `rebuild` works on, from decoded rows ``[B, T, C]`` and what was `predicted`. Rows of layers
        that are `coded_together` are those of all layers of the span, side by side. When ``sealing``, codes
        of the layer above are made from it, and it must not depend on which blocks come together."""
        return rows

    def accumulate(self, recalled: Tensor) -> Tensor:
        """What the layer itself accumulates, ``[B, T, W]``, in the space of the features."""
        return recalled

    def accumulated_above(self, own: Tensor, below: Tensor | None) -> Tensor:
        """What the layer above predicts from, ``[B, T, above_width]``: its ``own``, what this layer
        accumulated, then as much of what it got from ``below`` as there is room for, nearest layers first."""
        further = self.above_width - own.shape[-1]
        return own if below is None or further <= 0 else torch.cat([own, below[..., :further]], -1)

    @abstractmethod
    def rebuild(self, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (before RoPE unless `rotated`) and values, two ``[B, T, G*D]``."""

    @property
    def rebuild_cost(self) -> RebuildCost | None:
        """What `recall` and `rebuild` take. None where it is not known: plans and benchmarks then leave out
        what follows from it."""
        return None

    def exact(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The same from features that were never packed (sinks and tail)."""
        return self.rebuild(features)


class Rematerialized(LayerCodec):
    """Projects keys and values again from what is kept (arXiv 2508.10395): each is a product with a matrix,
    of ``Ck`` numbers of a token for keys, and of ``Cv`` for values."""

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


def by_block(x: Tensor, weight: Tensor, block: int) -> Tensor:
    """``x @ weight.T`` for ``x`` ``[B, ..., C]``, computed ``block`` rows of a sequence at a time.

    A matrix product may round differently for another number of rows. Codes must not depend on
    whether a block arrived alone or with others, so each block is its own product.
    """
    parts = x.flatten(1, -2).split(block, 1)
    return torch.cat([linear(part, weight) for part in parts], 1).unflatten(1, x.shape[1:-1])

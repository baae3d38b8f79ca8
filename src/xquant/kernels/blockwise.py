"""Blockwise attention in torch: a few blocks at a time, which the cache of a CPU can hold.

``softmax(q K^T) V`` is computed by an online softmax over runs of tokens: the running maximum ``m``, the sum
``l`` of ``exp(s - m)`` and the sum ``o`` of ``exp(s - m) v`` are rescaled whenever a run raises ``m``, and
``o / l`` is the result. It equals attention over `CompressedLayer.read`.

Letters: ``B`` sequences, ``c`` blocks of each, ``G`` key/value heads, ``R`` query heads of each, ``t``
queries, ``n`` tokens of a block, ``D`` channels of a head.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..models.rotation import apply_rope
from .backend import LayerAttention
from .call import AttentionCall

if TYPE_CHECKING:
    from ..past.growing_layer import CompressedLayer

LOWEST = -1e30
"""Below every score, yet a score minus it is a number."""

Weigh = Callable[[Tensor], Tensor]
Run = tuple[Tensor, Tensor | None, Weigh]
"""Some tokens: scores ``[B, c, G, R * t, n]``, their bias as `split_bias` gives it, and what sums values by
weights of the shape of the scores, to ``[B, c, G, R * t, D]``."""


class OnlineSoftmax:
    """A softmax over runs of tokens that come one after the other, and the sums that it weighs."""

    def __init__(self, left: Tensor, softcap: float | None, queries: int) -> None:
        self._softcap, self._queries = softcap, queries
        self.maximum = left.new_full((*left.shape[:-1], 1), LOWEST)  # [B, 1, G, R * t, 1]
        self.total = torch.zeros_like(self.maximum)
        self.sums = self.total  # [B, 1, G, R * t, D]

    def add(self, scores: Tensor, bias: Tensor | None, weigh: Weigh) -> None:
        """Another `Run`."""
        if self._softcap:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        if bias is not None:
            scores = (scores.unflatten(-2, (-1, self._queries)) + bias).flatten(-3, -2)
        shrink = self._raise(scores.amax(-1, keepdim=True).amax(1, keepdim=True))
        weights = torch.exp_(scores - self.maximum)
        self.total = self.total * shrink + weights.sum((1, 4), keepdim=True)
        self.sums = self.sums * shrink + weigh(weights).sum(1, keepdim=True)

    def combine(self, other: "OnlineSoftmax") -> None:
        """Add what another has weighed, of other tokens."""
        shrink = self._raise(other.maximum)
        grow = torch.exp(other.maximum - self.maximum)
        self.total = self.total * shrink + other.total * grow
        self.sums = self.sums * shrink + other.sums * grow

    def add_to_total(self, score: Tensor) -> None:
        """Count a score ``[G, R * t, 1]`` that has no value."""
        shrink = self._raise(score.expand_as(self.maximum))
        self.total = self.total * shrink + torch.exp(score - self.maximum)
        self.sums = self.sums * shrink

    def _raise(self, maximum: Tensor) -> Tensor:
        """Keep the higher of both maxima. Returns what the sums are to be multiplied with for it."""
        before, self.maximum = self.maximum, torch.maximum(self.maximum, maximum)
        return torch.exp(before - self.maximum)


class BlockwiseAttention(LayerAttention):
    """Attends over one layer, a few blocks at a time; the same on every device."""

    def __init__(self, layer: "CompressedLayer") -> None:
        self._layer = layer
        self._version = -1

    def attend(self, call: AttentionCall) -> Tensor | None:
        if not call.is_plain:
            return None
        query, key, value, mask, scaling, softcap, sink_logits = call
        if self._layer.stream.version != self._version:
            self._refresh()
        groups, queries = key.shape[1], query.shape[2]
        left = query.float().unflatten(1, (groups, -1)).flatten(2, 3)[:, None] * scaling
        bias = None if mask is None else _additive(mask)
        past = self._layer.tokens - queries
        sealed = min(self._layer.stream.tokens, past)
        seen = OnlineSoftmax(left, softcap, queries)
        for run in self._exact(left, key, value, bias, sealed, past):
            seen.add(*run)
        if sealed:
            coded = OnlineSoftmax(left, softcap, queries)
            for run in self._coded(left, key, bias, sealed):
                coded.add(*run)
            coded.sums = self._project(coded)
            seen.combine(coded)
        if self._layer.below is not None:
            self._layer.below.release()
        if sink_logits is not None:
            per_row = sink_logits.float().view(groups, -1).repeat_interleave(queries, 1)
            seen.add_to_total(per_row[..., None])
        out = seen.sums / seen.total.clamp(min=torch.finfo(seen.total.dtype).tiny)
        heads = out.squeeze(1).unflatten(2, (-1, queries)).flatten(1, 2)
        return heads.transpose(1, 2).to(query.dtype)

    def _refresh(self) -> None:
        """Where the tokens of the blocks stand as they are now, and which are not to be seen."""
        layer, stream = self._layer, self._layer.stream
        self._version = stream.version
        device = layer.codec.view.device
        lengths = torch.tensor(stream.lengths, dtype=torch.long, device=device)[:, None]
        within = torch.arange(stream.block, device=device)
        columns = (lengths.cumsum(0) - lengths + within).masked_fill(within >= lengths, stream.tokens)
        self._columns = columns.flatten()  # [c * n], past the end where a block was cropped
        hidden = (self._columns >= stream.tokens)[None]
        if layer.sinks is not None:
            hidden = hidden | (layer.sinks.columns[:, :, None] == self._columns).any(1)
        self._hidden = hidden if bool(hidden.any()) else None  # [B | 1, c * n]

    def _exact(
        self, left: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, limit: int, past: int
    ) -> Iterator[Run]:
        """The runs of all tokens but the first ``limit``, which are sealed, and of the sinks."""
        layer, queries = self._layer, key.shape[2]
        if past > limit:
            assert layer.tail is not None
            states = layer.built.of(layer.tail[:, : past - limit])
            tail = (s.transpose(1, 2) for s in layer.heads(states, limit))
            key, value = (torch.cat(each, 2) for each in zip(tail, (key, value), strict=True))
        recent = bias[..., limit:] if bias is not None else _causal(key, queries)
        yield exact(left, key, value, recent)
        if layer.sinks is not None:
            rows = layer.sinks.rows.to(layer.codec.view.dtype)
            yield self._sinks(left, rows, layer.sinks.columns.long(), bias, limit)

    def _sinks(self, left: Tensor, rows: Tensor, column: Tensor, bias: Tensor | None, limit: int) -> Run:
        """Of rows ``[B, S, W]`` in columns ``[B, S]``, -1 where there is none."""
        codec = self._layer.codec
        heads = codec.view.kv_heads
        keys, values = (s.unflatten(-1, (heads, -1)) for s in codec.exact(rows))
        at = column.clamp(min=0)[..., None]
        if not codec.rotated:
            cos, sin = (t.gather(1, at.expand(-1, -1, t.shape[2])) for t in self._layer.index.rope(keys))
            keys = apply_rope(keys, cos, sin)
        seen = left.new_zeros(1, 1, 1)
        if bias is not None:
            every = bias.expand(len(at), -1, -1)
            seen = every.gather(2, at.mT.expand(-1, every.shape[1], -1))
        seen = seen.masked_fill(((column < 0) | (column >= limit))[:, None], -torch.inf)
        return exact(left, keys.transpose(1, 2), values.transpose(1, 2), seen)

    @abstractmethod
    def _coded(self, left: Tensor, key: Tensor, bias: Tensor | None, limit: int) -> Iterator[Run]:
        """The runs of the first ``limit`` tokens, which are sealed. ``left`` ``[B, 1, G, R * t, D]``: scaled
        queries; ``bias`` ``[B, t, T]`` of all tokens."""

    def _project(self, coded: OnlineSoftmax) -> Tensor:
        """Sums of values ``[B, 1, G, R * t, D]`` from what the runs of `_coded` were weighed to."""
        return coded.sums

    def _hides(self, columns: slice, limit: int) -> Tensor | None:
        """Which tokens of the blocks, in these places of `_columns`, are not to be seen: bool
        ``[B | 1, c * n]``; None: none."""
        hidden = self._hidden
        if limit < self._layer.stream.tokens:
            late = (self._columns >= limit)[None]
            hidden = late if hidden is None else hidden | late
        return None if hidden is None else hidden[:, columns]

    def _blocks(
        self, left: Tensor, bias: Tensor | None, limit: int, step: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """By ``step`` blocks of each sequence: their numbers ``[B, c]``, what columns their tokens are in
        ``[c * n]`` (of those cropped away, any), and their bias as `split_bias` takes it."""
        stream = self._layer.stream
        assert stream.table is not None
        for start in range(0, len(stream.lengths), step):
            table = stream.table[:, start : start + step]
            places = slice(start * stream.block, (start + step) * stream.block)
            columns = self._columns[places].clamp(max=stream.tokens - 1)
            part = None if bias is None else bias[..., columns]
            hide = self._hides(places, limit)
            if hide is not None:
                seen = left.new_zeros(1, 1, 1) if part is None else part
                part = seen.masked_fill(hide[:, None], -torch.inf)
            yield table, columns, part


def exact(left: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Run:
    """Of keys and values ``[B, G, T, D]`` that are there."""
    keys, values = key[:, None].float(), value[:, None].float()
    return left @ keys.mT, split_bias(bias, 1), lambda weights: weights @ values


def _additive(mask: Tensor) -> Tensor:
    """A mask ``[B, 1, t, T]`` as what is added to scores, fp32 ``[B, t, T]``."""
    mask = mask.squeeze(1)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return mask.float()


def _causal(key: Tensor, queries: int) -> Tensor | None:
    """The bias of the newest tokens, ``[1, t, T]``, for keys of ``T`` tokens of which they are the last. None
    where it would be 0."""
    if queries == 1:
        return None
    shape = queries, key.shape[2]
    ahead = torch.ones(shape, dtype=torch.bool, device=key.device).triu(1 + shape[1] - queries)
    return _additive(~ahead[None, None])


def split_bias(bias: Tensor | None, blocks: int) -> Tensor | None:
    """A bias ``[B, t, c * n]`` as ``[B, c, 1, 1, t, n]``."""
    if bias is None:
        return None
    return bias.unflatten(-1, (blocks, -1)).movedim(2, 1)[:, :, None, None]

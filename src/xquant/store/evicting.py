"""EvictingLayer: a layer that drops tokens which recent ones hardly attend to."""

from typing import Any

import torch
from torch import Tensor

from .built import States
from .layer import CompressedLayer
from .tokens import visible


class EvictingLayer(CompressedLayer):
    """One layer of a `KVCache` with `methods.Pyramid`.

    Nothing is packed: the ``K`` rows of a sequence that are kept are the tail. ``columns`` int32 ``[B, K]``
    says which token of the text each is, ``weights`` fp32 ``[B, K]`` how much recent queries attended to it.
    The index of the cache knows dropped tokens, too, so positions and masks are those of the whole text.
    """

    evicts = True

    def reset(self) -> None:
        super().reset()
        self.columns: Tensor | None = None
        self.weights: Tensor | None = None
        self._seen = 0

    def snapshot(self) -> Any:
        return super().snapshot(), self.columns, self.weights, self._seen

    def restore(self, state: Any) -> None:
        past, self.columns, self.weights, self._seen = state
        super().restore(past)

    @property
    def tokens(self) -> int:
        return self._seen

    @property
    def due(self) -> int:
        return 0

    @property
    def tail_nbytes(self) -> int:
        own = (self.tail, self.columns, self.weights)
        return sum(tensor.nbytes for tensor in own if tensor is not None)

    def append_rows(self, rows: Tensor, hold: bool = False) -> None:
        super().append_rows(rows, hold)
        count = rows.shape[1]
        new = torch.arange(self._seen, self._seen + count, dtype=torch.int32, device=rows.device)
        new = new.expand(rows.shape[0], count)
        none = torch.zeros(new.shape, device=rows.device, dtype=torch.float32)
        self.columns = new.clone() if self.columns is None else torch.cat([self.columns, new], 1)
        self.weights = none if self.weights is None else torch.cat([self.weights, none], 1)
        self._seen += count

    def read(
        self, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `CompressedLayer.read`, of the kept tokens."""
        assert self.columns is not None
        if self.columns.shape[1] == key.shape[2]:  # nothing came before
            return key, value, mask
        if mask is not None and self.columns.shape[1] < self._seen:
            batch = self.columns.shape[0]
            columns = self.columns.long()[:, None, None].expand(
                -1, mask.shape[1], mask.shape[2], -1
            )
            mask = mask.expand(batch, -1, -1, -1).gather(-1, columns)
        return *self.states(), mask

    def states(self) -> States:
        assert self.tail is not None
        key, value = self.heads(self.codec.exact(self.tail), 0)
        return key.transpose(1, 2), value.transpose(1, 2)

    def see(
        self,
        query: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> None:
        """Learn which tokens the newest queries ``[B, H, t, D]`` attend to, after their `append`."""
        assert self.columns is not None and self.weights is not None
        count = min(query.shape[2], self.method.tail)
        key = self.states()[0].float()
        query = query[:, :, -count:].float().unflatten(1, (key.shape[1], -1))
        scores = torch.einsum("bghqd,bgkd->bghqk", query, key) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~self._seen_by(count, mask, key.shape[1]), -torch.inf)
        if sink_logits is not None:
            learned = sink_logits.to(scores).view(*scores.shape[1:3], 1, 1)
            scores = torch.cat([scores, learned.expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : self.columns.shape[1]]
        share = count / self.method.tail
        found = weights.nan_to_num(0).mean((1, 2, 3))  # NaN where padding asks
        self.weights = torch.lerp(self.weights, found, share)

    def _seen_by(self, count: int, mask: Tensor | None, groups: int) -> Tensor:
        """Which kept tokens the newest ``count`` queries see, bool ``[B, G | 1, R | 1, count | 1, K]``."""
        assert self.columns is not None
        columns = self.columns.long()
        if mask is not None:
            seen = visible(mask[:, :, -count:]).expand(len(columns), -1, -1, -1)
            seen = seen.gather(-1, columns[:, None, None].expand(*seen.shape[:3], -1))
            return seen.unflatten(1, (groups if seen.shape[1] > 1 else 1, -1))
        at = torch.arange(self._seen - count, self._seen, device=columns.device)
        seen = self.columns[:, None] <= at[:, None]
        seen &= self.index.real.to(columns.device).gather(1, columns)[:, None]
        return seen[:, None, None]

    def thin(self) -> None:
        """Keep sinks, the newest tokens, and of the rest those that were attended to most."""
        assert self.codec.kept is not None
        if self.tail is None or self.columns is None or self.weights is None:
            return
        kept = self.codec.kept(self._seen)
        if self.columns.shape[1] - kept < self.method.group:
            return
        newest = self.columns >= self._seen - self.method.tail
        sinks = self.index.sink.to(self.columns.device).gather(1, self.columns.long())
        kept = max(kept, int((newest | sinks).sum(1).max()))
        worth = self.weights.masked_fill(newest | sinks, torch.inf)
        best = worth.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
        self.columns, self.weights = self.columns.gather(1, best), self.weights.gather(1, best)
        rows = best[..., None].expand(-1, -1, self.tail.shape[2])
        self._hold(self.tail.gather(1, rows))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens. Those that were dropped before do not come back.

        Raises:
            ValueError: sequences would be left with different numbers of tokens.
        """
        if self.columns is None:
            return
        keep = max(self._seen - abs(tokens_to_remove), 0)
        left = (self.columns < keep).sum(1)
        if keep == 0 or not int(left.max()):
            return self.reset()
        if int(left.min()) != int(left.max()):
            raise ValueError(
                f"{self.method.spec} has dropped tokens: a batch can be cropped within its newest"
                f" {self.method.tail} tokens alone"
            )
        assert self.tail is not None and self.weights is not None
        rows = int(left.max())
        self._hold(self.tail[:, :rows].clone())
        self.columns = self.columns[:, :rows].clone()
        self.weights, self._seen = self.weights[:, :rows].clone(), keep
        self.release()

    def select(self, indices: Tensor) -> None:
        if self.columns is not None and self.weights is not None:
            chosen = indices.to(self.columns.device)
            self.columns, self.weights = self.columns[chosen], self.weights[chosen]
        super().select(indices)

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): attention over latents as a cache keeps them.

A layer gives its cache one latent ``[r]`` a token, of which all heads' keys and values are made, and one
rotated part ``[R]`` that all heads' keys share. transformers makes keys and values of the whole context in
every step. Here the matrix of the keys is absorbed into the query and that of the values into the output (its
section 2.1.2), so that a step of decoding reads latents alone: ``H (r + R)`` multiplications a token for
scores and ``H r`` for values, where keys and values alone take ``H r (D + V)``.

Letters: ``H`` heads whose keys have ``D`` channels and ``R`` rotated ones, and whose values have ``V``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .weights import is_plain

NAME = "kv_b_proj"


class Exact(NamedTuple):
    """Tokens whose latents are there."""

    latent: Tensor
    """``[B, T, r]``."""
    rotated: Tensor
    """``[B, T, R]``."""

    def scores(self, absorbed: Tensor, rotated_query: Tensor) -> Tensor:
        """fp32 ``[B, q, T]`` of queries ``[B, q, r]`` and ``[B, q, R]``."""
        return (absorbed @ self.latent.mT).float() + (rotated_query @ self.rotated.mT).float()

    def summed(self, weights: Tensor) -> Tensor:
        """Latents ``[B, q, r]``, weighted by ``[B, q, T]``."""
        return weights @ self.latent


class Coded(NamedTuple):
    """Tokens of which a codec keeps ``C`` numbers, that latents and rotated parts are products of. Its matrix
    is absorbed, too, so that neither is made of any token."""

    rows: Tensor
    """``[B, T, C]``."""
    weight: Tensor
    """``[r + R, C]``."""
    bias: Tensor
    """``[r + R]``."""
    sinks: Exact
    """``S`` tokens that are read as they are."""
    columns: Tensor
    """int64 ``[B, S]``: where these stand among the ``T``; ``T`` for one that is not there."""

    def scores(self, absorbed: Tensor, rotated_query: Tensor) -> Tensor:
        """As of `Exact`."""
        query = torch.cat([absorbed, rotated_query], -1)
        scores = (query @ self.weight @ self.rows.mT).float() + (query @ self.bias).float()[..., None]
        exact = self.sinks.scores(absorbed, rotated_query)
        return F.pad(scores, (0, 1)).scatter(-1, self._columns(exact), exact)[..., :-1]

    def summed(self, weights: Tensor) -> Tensor:
        """As of `Exact`."""
        weights = F.pad(weights, (0, 1))
        columns = self._columns(weights[..., : self.sinks.latent.shape[1]])
        of_sinks = self.sinks.summed(weights.gather(-1, columns))
        weights = weights.scatter(-1, columns, 0)[..., :-1]
        size = self.sinks.latent.shape[-1]
        coded = weights @ self.rows @ self.weight[:size].mT + weights.sum(-1, keepdim=True) * self.bias[:size]
        return coded + of_sinks

    def _columns(self, like: Tensor) -> Tensor:
        return self.columns[:, None].expand(like.shape)


@dataclass(eq=False)
class Latents:
    """What makes keys and values of a layer's latents."""

    projection: nn.Module  # [r] to [H * (D + V)]
    key_size: int  # D
    value_size: int  # V

    @property
    def weight(self) -> Tensor:
        """``[H, D + V, r]``."""
        weight: Any = self.projection.weight
        return weight.unflatten(0, (-1, self.key_size + self.value_size))

    def expand(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, T, D + R]`` and values ``[B, H, T, V]`` of latents ``[B, 1, T, r]`` and their rotated
        parts ``[B, 1, T, R]``."""
        made = F.linear(latent[:, 0], self.weight.flatten(0, 1))
        heads = made.unflatten(-1, (-1, self.key_size + self.value_size)).transpose(1, 2)
        key, value = heads.split((self.key_size, self.value_size), -1)
        return torch.cat([key, rotated.expand(-1, key.shape[1], -1, -1)], -1), value

    def attend(
        self, query: Tensor, parts: Sequence[Exact | Coded], mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Attention of queries ``[B, H, t, D + R]`` over the tokens of ``parts``, with the newest ``t``:
        ``[B, t, H, V]``.

        Args:
            mask: bool or added to scores, ``[B, 1, t, T]``; None for causal.
        """
        own, rotated_query = query.split((self.key_size, query.shape[-1] - self.key_size), -1)
        of_keys, of_values = self.weight.split((self.key_size, self.value_size), 1)
        absorbed = (own @ of_keys).flatten(1, 2)  # [B, H * t, r]
        each = [part.scores(absorbed, rotated_query.flatten(1, 2)) for part in parts]
        count, lengths = query.shape[2], [scores.shape[-1] for scores in each]
        scores = (torch.cat(each, -1) * scaling).unflatten(1, (-1, count))  # [B, H, t, T]
        if mask is None and count > 1:
            mask = torch.ones(count, sum(lengths), dtype=torch.bool, device=query.device)
            mask = mask.tril(sum(lengths) - count)[None, None]
        if mask is not None:
            closed = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask, closed) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1).to(query.dtype).flatten(1, 2).split(lengths, -1)
        sums = [part.summed(own) for part, own in zip(parts, weights, strict=True)]
        summed = torch.stack(sums).sum(0).unflatten(1, (-1, count))  # [B, H, t, r]
        return (summed @ of_values.mT).transpose(1, 2)


def latents_of(attention: Any, key: Tensor) -> Latents | None:
    """What makes keys and values of what ``attention`` gave its cache as ``key`` ``[1, G, T, r]``; None where
    that is no latent, or the matrix is not one that can be absorbed."""
    projection: Any = getattr(attention, NAME, None)
    names = ("qk_nope_head_dim", "v_head_dim")
    key_size, value_size = (int(getattr(attention, name, 0)) for name in names)
    plain = type(projection) is nn.Linear and is_plain(projection) and projection.bias is None
    if not plain or key.shape[1] != 1 or key.shape[-1] != projection.in_features:
        return None
    whole = key_size and value_size and projection.out_features % (key_size + value_size) == 0
    return Latents(projection, key_size, value_size) if whole else None

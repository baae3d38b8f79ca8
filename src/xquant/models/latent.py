"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): attention over latents as a cache keeps them.

A layer gives its cache one latent ``[r]`` a token, of which all heads' keys and values are made, and one
rotated part ``[R]`` that all heads' keys share. transformers makes keys and values of the whole context in
every step. Here the matrix of the keys is absorbed into the query and that of the values into the output (its
section 2.1.2), so that a step of decoding reads latents alone: ``H (r + R)`` multiplications a token for
scores and ``H r`` for values, where keys and values alone take ``H r (D + V)``.

Letters: ``H`` heads whose keys have ``D`` channels and ``R`` rotated ones, and whose values have ``V``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .weights import is_plain

NAME = "kv_b_proj"


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
        self, query: Tensor, latent: Tensor, rotated: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Attention of queries ``[B, H, t, D + R]`` over latents ``[B, 1, T, r]`` and rotated parts
        ``[B, 1, T, R]``, the newest ``t`` tokens' among them: ``[B, t, H, V]``.

        Args:
            mask: bool or added to scores, ``[B, 1, t, T]``; None for causal.
        """
        own, rotated_query = query.split((self.key_size, rotated.shape[-1]), -1)
        of_keys, of_values = self.weight.split((self.key_size, self.value_size), 1)
        absorbed = own @ of_keys  # [B, H, t, r]
        count, length = query.shape[2], latent.shape[2]
        scores = absorbed.flatten(1, 2) @ latent[:, 0].mT
        scores = scores.float() + (rotated_query.flatten(1, 2) @ rotated[:, 0].mT).float()
        scores = (scores * scaling).unflatten(1, (-1, count))  # [B, H, t, T]
        if mask is None and count > 1:
            mask = torch.ones(count, length, dtype=torch.bool, device=query.device)
            mask = mask.tril(length - count)[None, None]
        if mask is not None:
            closed = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask, closed) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1).to(latent.dtype).flatten(1, 2)
        summed = (weights @ latent[:, 0]).unflatten(1, (-1, count))  # [B, H, t, r]
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

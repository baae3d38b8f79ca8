"""Attention over keys and values that lie in memory as they are, for chunks of prompts."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .step import Chunks

States = tuple[Tensor, Tensor]
"""Keys and values, ``[tokens, G, D]``."""


class ExactAttention(Protocol):
    """Causal attention of the newest tokens of each sequence; an engine may have a faster one than torch."""

    def __call__(
        self,
        query: Tensor,
        states: Sequence[States],
        chunks: Chunks,
        scaling: float,
        softcap: float,
    ) -> Tensor:
        """``[t, H, D]`` of a query of this shape, the new tokens of all ``chunks`` after each other; the
        ``states`` of each end with these tokens. ``softcap`` of scores, 0 for none."""


def torch_attention(
    query: Tensor, states: Sequence[States], chunks: Chunks, scaling: float, softcap: float
) -> Tensor:
    """`ExactAttention` in torch, a sequence at a time."""
    counts = [chunk.new.stop - chunk.new.start for chunk in chunks.each]
    found = [
        _attention(part, *each, scaling, softcap)
        for part, each in zip(query.split(counts), states, strict=True)
    ]
    return torch.cat(found)


def _attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float) -> Tensor:
    new, tokens = len(query), len(keys)
    groups = query.shape[1] // keys.shape[1]
    seen = torch.ones(new, tokens, dtype=torch.bool, device="cpu").tril(tokens - new)
    queries, key, value = (t.transpose(0, 1)[None] for t in (query, keys, values))
    if not softcap:
        found = F.scaled_dot_product_attention(
            queries, key, value, seen, scale=scaling, enable_gqa=groups > 1
        )
        return found[0].transpose(0, 1)
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = (queries.float() @ key.float().mT) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value)[0].transpose(0, 1)

"""Attention over keys and values that lie in memory as they are, for chunks of prompts."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

States = tuple[Tensor, Tensor]
"""Keys and values, ``[tokens, G, D]``."""


class Scoring(NamedTuple):
    """How weights are made of the products of queries and keys."""

    scaling: float
    softcap: float = 0.0
    """0 for none."""
    sink_logits: Tensor | None = None
    """As of an `AttentionCall`."""


class ExactAttention(Protocol):
    """Causal attention of the newest tokens of each sequence."""

    def __call__(
        self, query: Tensor, states: Sequence[States], counts: Sequence[int], scoring: Scoring
    ) -> Tensor:
        """``[t, H, D]`` of a query of this shape.

        Args:
            query: of the new tokens of all sequences, after each other.
            states: of each sequence, in the query's dtype; they end with its new tokens.
            counts: how many new tokens each has.
        """


def torch_attention(
    query: Tensor, states: Sequence[States], counts: Sequence[int], scoring: Scoring
) -> Tensor:
    """`ExactAttention` in torch, a sequence at a time."""
    found = [
        _attention(part, *each, scoring) for part, each in zip(query.split([*counts]), states, strict=True)
    ]
    return torch.cat(found)


def _attention(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    scaling, softcap, logits = scoring
    new, tokens = len(query), len(keys)
    groups = query.shape[1] // keys.shape[1]
    seen = torch.ones(new, tokens, dtype=torch.bool, device="cpu").tril(tokens - new)
    queries, key, value = (t.transpose(0, 1)[None] for t in (query, keys, values))
    if not softcap and logits is None:
        found = F.scaled_dot_product_attention(
            queries, key, value, seen, scale=scaling, enable_gqa=groups > 1
        )
        return found[0].transpose(0, 1)
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = (queries.float() @ key.float().mT) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if logits is not None:  # a term of the softmax whose value is 0
        term = logits.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores, value = torch.cat([scores, term], -1), F.pad(value, (0, 0, 0, 1))
    return (scores.softmax(-1).to(value.dtype) @ value)[0].transpose(0, 1)

"""Attention of a prompt over whole states, on a CPU: in place of the model's own.

That repeats keys and values for each query head, and adds a mask to all scores. But a prompt's mask says what
every token knows: it sees those before it.
"""

from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..past.exact import ExactAttention, Scoring
from ..past.sequences import MOST_QUERIES
from ..past.tokens import visible
from .call import FLOATS, AttentionCall


class PromptAttention:
    """Attends by one function, at the layers of all models."""

    def __init__(self, exact: ExactAttention) -> None:
        self._exact = exact
        self._seen: tuple[ReferenceType[Tensor], ReferenceType[object], bool] | None = None

    def attend(self, call: AttentionCall, within: object) -> Tensor | None:
        """Attention of the newest tokens ``[B, t, H, D]``, where keys and values of the call are of all
        tokens, ``[B, G, T, D]``. None where the model must attend: with few queries, with padding or another
        mask that is not causal, with value heads of another size, on a GPU, under autocast, and where
        gradients go back through it.

        Args:
            within: the forward pass. A mask may be written to between two.
        """
        query, key, value, mask, scaling, softcap, logits = call
        (batch, heads, count, size), (_, kv_heads, tokens, _) = query.shape, key.shape
        if count <= MOST_QUERIES or key.shape != value.shape or key.shape != (batch, kv_heads, tokens, size):
            return None
        plain = all(type(t) is Tensor and t.is_cpu and not t.requires_grad for t in call[:3])
        alike = query.dtype == key.dtype == value.dtype and query.dtype in FLOATS and heads % kv_heads == 0
        if not (plain and alike and call.is_plain) or torch.is_autocast_enabled("cpu"):
            return None
        if mask is not None and not self._is_causal(mask, within, (batch, 1, count, tokens)):
            return None
        rows, keys, values = (states.transpose(1, 2) for states in call[:3])
        scoring = Scoring(scaling, softcap or 0.0, logits)
        each = [*zip(keys, values, strict=True)]
        return self._exact(rows.flatten(0, 1), each, [count] * batch, scoring).unflatten(0, (batch, count))

    def _is_causal(self, mask: Tensor, within: object, shape: tuple[int, int, int, int]) -> bool:
        """Whether each of the newest tokens sees those before it, and itself, and nothing else. All layers
        of a pass are given one mask, which is looked at once."""
        seen = self._seen
        if seen is None or seen[0]() is not mask or seen[1]() is not within:
            fits = all(n in (1, size) for n, size in zip(mask.shape, shape, strict=True))
            wanted = torch.ones(shape[2:], dtype=torch.bool, device="cpu").tril_(shape[3] - shape[2])
            shown = visible(mask)
            same = fits and shown.shape[2:] == wanted.shape and bool((shown == wanted).all())
            if same and mask.is_floating_point():  # it may add to scores
                same = bool(((mask == 0) == wanted).all())
            seen = self._seen = ref(mask), ref(within), same
        return seen[2]

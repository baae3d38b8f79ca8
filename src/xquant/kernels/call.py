"""AttentionCall: what one call of a layer's attention is given, whatever answers it."""

from typing import NamedTuple

import torch
from torch import Tensor

MASKED = (torch.bool, torch.float32, torch.bfloat16, torch.float16)


class AttentionCall(NamedTuple):
    """The newest ``t`` tokens at one layer, as the attention function gets them, and how scores are made."""

    query: Tensor
    """``[B, H, t, D]``."""
    key: Tensor
    """Their exact states, rotated, as the values: ``[B, G, t, D]``."""
    value: Tensor
    mask: Tensor | None
    """Over all tokens, bool or added to scores, ``[B, 1, t, T]``; None for causal."""
    scaling: float
    softcap: float | None
    sink_logits: Tensor | None = None
    """Learned, ``[H]``: one more term of each query head's softmax, which has no value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether mask and sink logits are such as kernels can read."""
        mask, logits = self.mask, self.sink_logits
        if logits is not None and logits.shape != self.query.shape[1:2]:
            return False
        return mask is None or (mask.dtype in MASKED and mask.shape[1] == 1)

"""BuiltTail: the keys and values of recent tokens, for layers that keep something else of them.

A layer that keeps its input X would project the whole tail in every step. What the model itself computed of
new tokens is kept instead, until they are sealed.
"""

import torch
from torch import Tensor

from ..methods import AttentionInputs, LayerCodec
from ..methods.key_value import states_of
from .rows import GrowingRows

States = tuple[Tensor, Tensor]


class BuiltTail:
    """Keys (before RoPE unless the codec is `rotated`) and values of the tokens of a tail, from its first on;
    the newest may be missing."""

    def __init__(self, codec: LayerCodec) -> None:
        self._codec, self._rows = codec, GrowingRows()
        self.forget()

    @property
    def nbytes(self) -> int:
        return 0 if self.states is None else self.states.nbytes

    def forget(self) -> None:
        """Have them built from what the tail holds, when they are asked for."""
        self.states: Tensor | None = None  # [B, t, G*D + G*D]
        self._rows.forget()

    def see(self, inputs: AttentionInputs, length: int) -> None:
        """A forward pass has given ``inputs`` for the newest tokens of a tail, which has ``length`` now."""
        if self._codec.keeps_states:
            return
        missing = length - (0 if self.states is None else self.states.shape[1])
        if 0 < missing <= inputs.x.shape[1]:
            self._add(states_of(self._codec, inputs.last(missing)))

    def of(self, tail: Tensor) -> States:
        """Keys and values ``[B, t, G*D]`` of the first tokens ``[B, t, W]`` of the tail."""
        if self._codec.keeps_states:
            return self._codec.exact(tail)
        states = self.rows(tail, tail.shape[1])[:, : tail.shape[1]]
        width = self._codec.view.kv_width
        return states[..., :width], states[..., width:]

    def rows(self, tail: Tensor, count: int) -> Tensor:
        """Keys beside values ``[B, ., 2 G D]`` of the first ``count`` tokens of the tail, and perhaps of
        more."""
        known = 0 if self.states is None else self.states.shape[1]
        if known < count or self.states is None:
            rows = tail[:, known:count].to(self._codec.view.dtype)  # under autocast they may be another
            self._add(torch.cat(self._codec.exact(rows), -1))
        assert self.states is not None
        return self.states

    def _add(self, states: Tensor) -> None:
        self.states = self._rows.extended(self.states, states.detach())

    def restore(self, states: Tensor | None) -> None:
        """Have the ``states`` of an earlier time."""
        self.states = states
        self._rows.forget()

    def drop(self, count: int) -> None:
        """The first ``count`` tokens have left the tail."""
        if self.states is not None:
            self.restore(self.states[:, count:].clone())

    def cut(self, length: int) -> None:
        """The tail has its first ``length`` tokens only."""
        if self.states is not None:
            self.restore(self.states[:, :length].clone())

    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` of the batch, in this order."""
        if self.states is not None:
            self.restore(self.states[indices.to(self.states.device)])

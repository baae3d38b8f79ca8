"""Snapshot: what a cache held at one moment. Blocks are only ever added, so it copies nothing of them."""

import copy
from dataclasses import dataclass
from typing import Any

from .. import compat
from ..past.growing import State as LayerState
from ..past.growing_layer import CompressedLayer
from ..past.tokens import State as IndexState
from ..past.tokens import TokenIndex
from .contents import Contents


@dataclass(frozen=True)
class Snapshot:
    """Brings a cache back, to the bit, from a forward pass or a change that failed half way."""

    index: TokenIndex
    state: IndexState
    layers: list[tuple[CompressedLayer, LayerState]]
    others: dict[int, Any]
    """Layers that are not ours, by number: they cannot be cropped past their window, so they are put back."""
    linear_states: dict[int, Any]
    """States beside ours."""

    @classmethod
    def of(cls, contents: Contents) -> "Snapshot":
        layers = [(layer, layer.snapshot()) for layer in contents.compressed]
        others = {number: _copied(layer) for number, layer in contents.others.items()}
        linear_states = {number: _copied(state) for number, state in contents.linear_states.items()}
        return cls(contents.index, contents.index.snapshot(), layers, others, linear_states)

    @property
    def tokens(self) -> int:
        """That the compressed layers held."""
        return self.state[0].shape[1]

    def length(self, layer: int) -> int:
        """Tokens that layer number ``layer`` held."""
        if layer in self.others:
            other = self.others[layer]
            return int(other.get_seq_length()) if compat.keeps_tokens(other) else self.tokens
        return self.tokens

    def bring_back(self, contents: Contents) -> None:
        if self.index is contents.index:
            contents.index.restore(self.state)
            for layer, state in self.layers:
                layer.restore(state)
        else:  # its layers were made anew since, so they were empty
            contents.stack.reset()
        for number, other in self.others.items():
            contents.layers[number] = _copied(other)
        for number, state in self.linear_states.items():
            contents.linear_states[number] = _copied(state)


def _copied(layer: Any) -> Any:
    """A layer that is not ours. States of linear attention are written in place, so they are copied."""
    return copy.copy(layer) if compat.keeps_tokens(layer) else copy.deepcopy(layer)

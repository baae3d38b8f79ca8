"""Snapshot: what a cache held at one moment. Blocks are only ever added, so it copies nothing of them."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import compat
from .store.layer import CompressedLayer
from .store.past import State as LayerState
from .store.tokens import State as IndexState
from .store.tokens import TokenIndex

if TYPE_CHECKING:
    from .cache import KVCache


@dataclass(frozen=True)
class Snapshot:
    """Brings a cache back, to the bit, from a forward pass or a change that failed half way."""

    index: TokenIndex
    state: IndexState
    layers: list[tuple[CompressedLayer, LayerState]]
    others: dict[int, Any]
    """Layers that are not ours, by number: they cannot be cropped past their window, so they are put back."""
    beside: dict[int, Any]
    """States beside ours."""

    @classmethod
    def of(cls, cache: "KVCache") -> "Snapshot":
        layers, others = [], {}
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, CompressedLayer):
                layers.append((layer, layer.snapshot()))
            else:
                others[number] = _copied(layer)
        beside = {index: _copied(layer) for index, layer in cache.beside.items()}
        return cls(cache.index, cache.index.snapshot(), layers, others, beside)

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

    def bring_back(self, cache: "KVCache") -> None:
        if self.index is cache.index:
            cache.index.restore(self.state)
            for layer, state in self.layers:
                layer.restore(state)
        else:  # its layers were made anew since, so they were empty
            cache.stack.reset()
        for number, other in self.others.items():
            cache.layers[number] = _copied(other)
        cache.beside = {number: _copied(state) for number, state in self.beside.items()}


def _copied(layer: Any) -> Any:
    """A layer that is not ours. States of linear attention are written in place, so they are copied."""
    return copy.copy(layer) if compat.keeps_tokens(layer) else copy.deepcopy(layer)

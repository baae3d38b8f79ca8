"""Contents: all that a cache holds, for what reads and writes it: files, chunks, conversion, reports."""

from dataclasses import dataclass
from typing import Any

from ..methods import LayerCodec, Method
from ..past.growing_layer import CompressedLayer
from ..past.tokens import TokenIndex
from ..seam.hooks import Attachment
from .stack import LayerStack


@dataclass(frozen=True)
class Contents:
    """What a cache holds between two forward passes. The parts are the cache's own: it changes with them."""

    attachment: Attachment
    """Of the model."""
    method: Method
    stack: LayerStack
    layers: list[Any]
    """All layers, by number: compressed ones, and those that transformers keeps itself."""
    linear_states: dict[int, Any]
    """States of linear attention beside compressed keys and values, by layer."""

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that the method compresses, bottom up."""
        return self.stack.layers

    @property
    def others(self) -> dict[int, Any]:
        """The layers that transformers keeps itself, by number."""
        layers = enumerate(self.layers)
        return {i: layer for i, layer in layers if not isinstance(layer, CompressedLayer)}

    @property
    def codecs(self) -> list[LayerCodec]:
        return self.stack.codecs

    @property
    def index(self) -> TokenIndex:
        """Positions, padding and sinks of the tokens that compressed layers hold."""
        return self.stack.index

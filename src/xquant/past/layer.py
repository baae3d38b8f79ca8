"""PastLayer: what transformers asks of a layer of a cache, whichever memory its past lies in."""

from abc import abstractmethod

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..methods import LayerCodec
from .built import States


def other_dtype(layer: int, given: torch.dtype, held: torch.dtype, instead: str) -> ValueError:
    """That a layer of a model gives states of another dtype than its past has."""
    return ValueError(
        f"layer {layer} gives {given} states, and the cache holds {held} ones: the model was cast or autocast"
        f" changed since; {instead}"
    )


class PastLayer(CacheLayerMixin):
    """The past of one layer of attention, as a layer of a cache.

    A cache stores new states by its own `update`, and a layer alone refuses them in its own words.
    """

    codec: LayerCodec
    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    @property
    @abstractmethod
    def held_dtype(self) -> torch.dtype:
        """Of the tokens that are kept as they are, where there are any."""

    @abstractmethod
    def states(self) -> States:
        """Keys and values of all tokens as attention reads them, two ``[B, G, T, D]``; of one at least."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_cache_shape(self) -> int:  # the name of `get_max_length` before transformers 5.13
        return self.get_max_length()

    @property
    def device(self) -> torch.device:
        return self.codec.view.device

    @property
    def dtype(self) -> torch.dtype:
        """Of what `keys` gives."""
        return self.held_dtype if self.is_initialized else self.codec.view.dtype

    @property
    @torch.no_grad()
    def keys(self) -> Tensor | None:
        """Keys of all tokens as attention reads them, decoded, ``[B, G, T, D]``; for tools that look into a
        cache. None where there are no tokens."""
        return self.codec.view.as_in_model(self.states()[0]) if self.get_seq_length() else None

    @property
    @torch.no_grad()
    def values(self) -> Tensor | None:
        """The same of values."""
        return self.states()[1] if self.get_seq_length() else None

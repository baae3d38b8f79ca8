"""ChangingCache: how the batch and the length of a cache change, in all of its layers or in none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..contents.linear_states import LinearStatesCache
from ..contents.stack import LayerStack
from ..past.growing_layer import CompressedLayer
from ..past.tokens import TokenIndex
from .base import CompressedCache

WINDOW = "_sliding_window_tensor"


class ChangingCache(LinearStatesCache, CompressedCache):
    """What transformers asks of a cache between forward passes: to be emptied, cut short, and to have its
    sequences chosen, repeated and reordered."""

    stack: LayerStack
    saved_tokens: Tensor | None

    @property
    def index(self) -> TokenIndex:
        """Positions, padding and sinks of the tokens that the compressed layers hold."""
        return self.stack.index

    @property
    def is_initialized(self) -> bool:
        """Whether all layers of attention hold tokens."""
        layers = [each for each in self.layers if _keeps_tokens(each)]
        return bool(layers) and all(layer.is_initialized for layer in layers)

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """Keys and values of each layer as attention reads them, and the length of its sliding window."""
        for layer in self.layers:
            yield tuple(getattr(layer, name, None) for name in ("keys", "values", WINDOW))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """All layers change, or none: an error, or an interruption, brings back what was."""
        before = self.snapshot()
        try:
            yield
        except BaseException:
            self.restore(before)
            raise

    def reset(self) -> None:
        """Empty the cache for another batch; the model stays attached."""
        self._undo()
        # Layers that are not ours are made anew: before 5.18, theirs keep their length when reset.
        own = compat.default_layers(self._config)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, CompressedLayer):
                self.layers[i] = own[i]
                if getattr(layer, "record_past", False):
                    own[i].activate_past_recording()
        self._forget_states(own)
        self.stack.reset()
        self.saved_tokens = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens: ``-n`` removes ``n``, a positive number is the length to keep.

        Where a block is cut in two, the tokens of it that stay keep the codes of the block, also those that
        were exact before it was sealed. Drafts are spared that: what the newest forward pass has sealed is
        exact again where the pass had 2 to 16 tokens after others, and no layer is predicted from another.
        """
        with self._changing():
            length, keep = self.index.length, self._length_after(tokens_to_remove)
            self.stack.unseal(keep)
            for layer in (*self.layers, *self.linear_states.values()):
                own = isinstance(layer, CompressedLayer)
                layer.crop(keep - length if own else tokens_to_remove)
            self.index.crop(keep) if keep else self.index.reset()
        if self.saved_tokens is not None:
            self.saved_tokens = self.saved_tokens[:, :keep] if keep else None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (integers, or a bool mask over the batch).

        Raises:
            ValueError: none is selected, or one that the batch has not.
        """
        indices = torch.as_tensor(indices, device=getattr(indices, "device", "cpu"))
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        if indices.numel() == 0:
            raise ValueError("no sequence is selected: reset() empties a cache")
        batch = self.index.batch
        if not batch:
            return
        if int(indices.min()) < -batch or int(indices.max()) >= batch:
            raise ValueError(f"sequences {indices.tolist()} of a batch of {batch}")
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times. Compressed blocks are shared, not copied.

        Raises:
            ValueError: ``repeats`` is below 1.
        """
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: it is 1 at least; reset() empties a cache")
        if self.index.batch:
            self._select(torch.arange(self.index.batch, device="cpu").repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        if self.index.batch:
            self._select(beam_idx)

    def _select(self, indices: Tensor) -> None:
        with self._changing():
            self.stack.forget_unsealed()
            for layer in (*self.layers, *self.linear_states.values()):
                getattr(layer, "batch_select_indices", layer.reorder_cache)(indices)
            self.index.select(indices)
        if self.saved_tokens is not None:
            self.saved_tokens = self.saved_tokens[indices.cpu()]


def _keeps_tokens(layer: Any) -> bool:
    return isinstance(layer, CompressedLayer) or compat.keeps_tokens(layer)

"""How many tokens fit into an engine's memory.

An engine's pool is made of blocks. A block has one page of every layer, or some of the rings of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..methods import LayerCodec
from ..store.pages import PageLayout
from .build import Model, shard_of
from .fit import Wanted, codecs_for
from .step import Keeping

_STOCK = 128
"""Tokens of a block of vLLM's own, on a CPU."""


@dataclass(frozen=True)
class Room:
    """What layers ask of a pool."""

    block: int
    """Tokens of a page."""
    pages: Sequence[int]
    """Bytes of a page of each layer."""
    ring: int
    """Bytes of a ring, the same in all layers; 0: there is none."""

    @property
    def share(self) -> int:
        """Bytes a token that every layer is given of a block. An engine wants one number for all: layers
        whose pages differ in size take them out of the sum, after each other."""
        return -(-sum(self.pages) // (len(self.pages) * self.block))

    @property
    def page(self) -> int:
        """Bytes that every layer is given of a block."""
        return self.share * self.block

    @property
    def starts(self) -> list[int]:
        """Where the page of each layer begins in a block."""
        return [sum(self.pages[:layer]) for layer in range(len(self.pages))]

    @property
    def nbytes(self) -> int:
        """Of a block of the pool."""
        pages = len(self.pages) * self.page
        return max(pages, self._rings_beside * self.ring)

    @property
    def blocks_of_rings(self) -> int:
        """That a request takes for its rings, however long it is."""
        return -(-len(self.pages) // self._rings_beside) if self.ring else 0

    @property
    def _rings_beside(self) -> int:
        """Rings in a block."""
        if not self.ring:
            return 0
        most = max(len(self.pages) * self.page // self.ring, 1)
        groups = -(-len(self.pages) // most)
        return -(-len(self.pages) // groups)

    def tokens(self, nbytes: int, context: int) -> int:
        """That fit into a pool of so many bytes, in requests of ``context`` tokens."""
        blocks = -(-context // self.block) + self.blocks_of_rings
        return int(nbytes // self.nbytes / blocks * context)


def room_of(codecs: Sequence[LayerCodec], keeping: Keeping, dtype: torch.dtype) -> Room:
    """What these layers ask of a pool; ``dtype`` of their states."""
    pages = [PageLayout(codec.segments, keeping.block).nbytes for codec in codecs]
    row = 2 * max(codec.view.kv_width for codec in codecs)
    return Room(keeping.block, pages, keeping.capacity * row * dtype.itemsize)


def room_in(asked: Wanted, model: Model, drafts: int = 0) -> Room:
    """What a method asks of the pool of a shard, for a model that is not loaded.

    Args:
        drafts: tokens that are guessed at a time.

    Raises:
        ValueError: it cannot be served; the message says why.
    """
    codecs = codecs_for(asked, model, None, 0, weighted=False)
    return room_of(codecs, asked.keeping(drafts), model.dtype)


def stock_room(model: Model) -> Room:
    """What vLLM's own cache asks of the pool of a shard.

    Raises:
        ValueError: heads cannot be divided among so many.
    """
    widths = [view.kv_width for view in shard_of(model.layers, 0, model.shards)]
    return Room(_STOCK, [_STOCK * 2 * width * model.dtype.itemsize for width in widths], 0)

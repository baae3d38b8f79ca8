"""How many tokens fit into an engine's memory.

An engine's pool is made of blocks. A block has one page of every compressed layer, some of the rings of a
request, or states of some of the layers with sliding windows, as the engine itself keeps them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..methods import LayerCodec
from ..past.pages import PageLayout
from ..past.step import Retention
from .build import Model, shard_of
from .fit import Wanted, codecs_for

_STOCK = 128
"""Tokens of a block of vLLM's own, on a CPU."""
_MUCH = 1 << 50
"""Bytes of a pool that has room for any request."""
USUAL_BATCH = 2048
"""Tokens of a step, where ``vllm serve`` is not told how many (`max_num_batched_tokens`), on a CPU."""


@dataclass(frozen=True)
class Windows:
    """Layers with sliding windows of one size."""

    layers: int
    page: int
    """Bytes of a layer in a block."""
    window: int
    """Tokens that are attended to."""

    def blocks(self, block: int, context: int, batched: int) -> int:
        """That a request has at most of one layer, in steps of so many tokens: a window begins where it
        likes in a block."""
        return -(-min(self.window - 1 + batched, context) // block) + 1


@dataclass(frozen=True)
class Room:
    """What layers ask of a pool."""

    block: int
    """Tokens of a page."""
    pages: Sequence[int]
    """Bytes of a page of each layer."""
    ring: int
    """Bytes of a ring, the same in all layers; 0: there is none."""
    windows: Sequence[Windows] = ()

    @property
    def share(self) -> int:
        """Bytes a token that every layer is given of a block. An engine wants one number for all: layers
        whose pages differ in size take them out of the sum, after each other."""
        share = -(-sum(self.pages) // (len(self.pages) * self.block))
        # Were all pages of one size, vLLM would pack them by another rule, and part layers with pages.
        same = {share * self.block, self.ring, *(each.page for each in self.windows)}
        return share + 1 if self.windows and len(same) == 1 else share

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
        return max(pages, self.ring, *(each.page for each in self.windows))

    @property
    def blocks_of_rings(self) -> int:
        """That a request takes for its rings, however long it is."""
        return self._groups(len(self.pages), self.ring) if self.ring else 0

    def _groups(self, layers: int, page: int) -> int:
        """Blocks for so many layers of this size, at the same tokens."""
        return -(-layers // (self.nbytes // page))

    def tokens(self, nbytes: int, context: int, batched: int = USUAL_BATCH) -> int:
        """That fit into a pool of so many bytes, in requests of ``context`` tokens, and steps of
        ``batched``."""
        blocks = self._groups(len(self.pages), self.page) * -(-context // self.block)
        for each in self.windows:
            groups = self._groups(each.layers, each.page)
            blocks += groups * each.blocks(self.block, context, batched)
        return int(nbytes // self.nbytes / (blocks + self.blocks_of_rings) * context)


class StockRoom(Room):
    """What vLLM's own cache asks for. All layers have pages of one size, if some have sliding windows."""

    @property
    def nbytes(self) -> int:
        if not self.windows:
            return super().nbytes
        # vLLM's rule: as many layers in a block as there are of the rarest kind, or of the commonest where
        # that is not many more.
        counts = [len(self.pages), *(each.layers for each in self.windows)]
        least, most = min(counts), max(counts)
        return self.page * (most if most < 1.5 * least else least)


def room_of(
    codecs: Sequence[LayerCodec],
    retention: Retention,
    dtype: torch.dtype,
    windows: Mapping[int, int],
) -> Room:
    """What these layers ask of a pool; ``dtype`` of their states. ``windows``: see `Model`."""
    pages = [PageLayout(codec.segments, retention.block).nbytes for codec in codecs]
    row = 2 * max(codec.view.kv_width for codec in codecs)
    sliding = _windows(windows, retention.block * row * dtype.itemsize)
    ring = retention.block * retention.width(row) * dtype.itemsize
    return Room(retention.block, pages, ring, sliding)


def _windows(windows: Mapping[int, int], page: int) -> list[Windows]:
    return [Windows(layers, page, window) for window, layers in windows.items()]


def room_in(asked: Wanted, model: Model, drafts: int = 0) -> Room:
    """What a method asks of the pool of a shard, for a model that is not loaded.

    Args:
        drafts: tokens that are guessed at a time.

    Raises:
        ValueError: it cannot be served; the message says why.
    """
    codecs = codecs_for(asked, model, None, 0, weighted=False)
    return room_of(codecs, asked.retention(drafts), model.dtype, model.windows)


def left_beside_recent(asked: Wanted, model: Model, drafts: int, context: int) -> float:
    """What is left of the tokens that fit, in requests of ``context`` tokens, where a method keeps recent
    tokens as they are and ``drafts`` are guessed: 1 where neither takes more room.

    Raises:
        ValueError: it cannot be served; the message says why.
    """
    if not asked.method.tail and not drafts:
        return 1.0
    plain = replace(asked, method=replace(asked.method, tail=0))
    rooms = room_in(asked, model, drafts), room_in(plain, model)
    own, most = (room.tokens(_MUCH, context) for room in rooms)
    return own / most


def stock_room(model: Model) -> Room:
    """What vLLM's own cache asks of the pool of a shard.

    Raises:
        ValueError: heads cannot be divided among so many.
    """
    widths = [view.kv_width for view in shard_of(model.layers, 0, model.shards)]
    pages = [_STOCK * 2 * width * model.dtype.itemsize for width in widths]
    return StockRoom(_STOCK, pages, 0, _windows(model.windows, pages[0]))

"""How many tokens fit into an engine's memory.

An engine's pool is made of blocks. A block has one page of every compressed layer, some of the rings of a
request, or what the engine itself keeps of some other layers: tokens of sliding windows, or a state.
"""

from collections.abc import Sequence
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
    block: int
    """Tokens of a page."""

    def blocks(self, context: int, batched: int) -> int:
        """That a request has at most of one layer, in steps of so many tokens: a window begins where it
        likes in a block."""
        return -(-min(self.window - 1 + batched, context) // self.block) + 1


@dataclass(frozen=True)
class States:
    """Layers that keep a state of one size, as Mamba's and linear attention do."""

    layers: int
    page: int
    """Bytes of a state."""
    each: int = 1
    """States that a request has of a layer."""

    def blocks(self, context: int, batched: int) -> int:
        """As of `Windows`."""
        return self.each


@dataclass(frozen=True)
class Room:
    """What layers ask of a pool."""

    block: int
    """Tokens of a page."""
    pages: Sequence[int]
    """Bytes of a page of each layer."""
    ring: int
    """Bytes of a ring, the same in all layers; 0: there is none."""
    others: Sequence[Windows | States] = ()
    """What the engine keeps itself."""

    @property
    def share(self) -> int:
        """Bytes a token that every layer is given of a block. An engine wants one number for all: layers
        whose pages differ in size take them out of the sum, after each other."""
        share = -(-sum(self.pages) // (len(self.pages) * self.block))
        # Were all pages of one size, vLLM would pack them by another rule, and part layers with pages.
        same = {share * self.block, self.ring, *(each.page for each in self.others)}
        return share + 1 if self.others and len(same) == 1 else share

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
        return max(pages, self.ring, *(each.page for each in self.others))

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
        for each in self.others:
            groups = self._groups(each.layers, each.page)
            blocks += groups * each.blocks(context, batched)
        return int(nbytes // self.nbytes / (blocks + self.blocks_of_rings) * context)


class StockRoom(Room):
    """What vLLM's own cache asks for. All layers have pages of one size, if some differ in what they keep."""

    @property
    def nbytes(self) -> int:
        if not self.others:
            return super().nbytes
        # vLLM's rule: as many layers in a block as there are of the rarest kind, or of the commonest where
        # that is not many more.
        counts = [len(self.pages), *(each.layers for each in self.others)]
        least, most = min(counts), max(counts)
        return self.page * (most if most < 1.5 * least else least)


def room_of(
    codecs: Sequence[LayerCodec], retention: Retention, model: Model, states: Sequence[States] | None = None
) -> Room:
    """What these layers of a shard ask of a pool, beside those with sliding windows, and ``states``: those
    that are planned for, where none are given.

    Raises:
        ValueError: as of `planned_states`.
    """
    states = planned_states(model) if states is None else states
    block, nbytes = retention.block, model.dtype.itemsize
    pages = [PageLayout(codec.segments, block).nbytes for codec in codecs]
    row = 2 * max(codec.view.kv_width for codec in codecs)
    windows = [Windows(n, block * size, tokens, block) for tokens, size, n in _windows(model)]
    return Room(block, pages, block * retention.width(row) * nbytes, [*windows, *states])


def planned_states(model: Model, drafts: int = 0) -> list[States]:
    """The states that vLLM keeps of a model that is not loaded, where prefixes are not found again: then a
    request has one of each layer, and otherwise two. Recurrent ones have a dtype of their own where the
    model says so, and are fp32 on a CPU with AVX-512 BF16, whose kernels want that.

    Raises:
        ValueError: their sizes cannot be found without weights.
    """
    named = getattr(model.config, "mamba_ssm_dtype", None)
    recurrent = getattr(torch, str(named).removeprefix("torch."), model.dtype) if named else model.dtype
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        recurrent = torch.float32
    found = []
    for state, layers in model.states.items():
        conv = state.channels * (state.columns + drafts) * model.dtype.itemsize
        page = (conv + state.recurrent * recurrent.itemsize) // model.shards
        found.append(States(layers, page))
    return found


def _windows(model: Model) -> list[tuple[int, int, int]]:
    """Of a shard's layers with sliding windows, by kind: tokens of a window, bytes of a token, and how many
    there are."""
    nbytes = model.dtype.itemsize
    return [(kind.tokens, kind.width // model.shards * nbytes, n) for kind, n in model.windows.items()]


def room_in(asked: Wanted, model: Model, drafts: int = 0) -> Room:
    """What a method asks of the pool of a shard, for a model that is not loaded.

    Args:
        drafts: tokens that are guessed at a time.

    Raises:
        ValueError: it cannot be served; the message says why.
    """
    codecs = codecs_for(asked, model, None, 0, weighted=False)
    return room_of(codecs, asked.retention(drafts), model, planned_states(model, drafts))


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


def stock_room(model: Model, states: Sequence[States] | None = None) -> Room:
    """What vLLM's own cache asks of the pool of a shard, with ``states`` as of `room_of`.

    Raises:
        ValueError: heads cannot be divided among so many; as of `planned_states`.
    """
    states = planned_states(model) if states is None else states
    nbytes = [2 * view.kv_width * model.dtype.itemsize for view in shard_of(model.layers, 0, model.shards)]
    windows = _windows(model)
    if not windows and not states:
        return StockRoom(_STOCK, [_STOCK * each for each in nbytes], 0)
    # All get pages of one size. A state is padded to it; of tokens a page has more, where that fits evenly.
    page = _STOCK * max([*nbytes, *(size for _, size, _ in windows)])
    page *= max((-(-each.page // page) for each in states), default=1)

    def block_of(size: int) -> int:
        return page // size if page % (_STOCK * size) == 0 else _STOCK

    others = [Windows(n, page, tokens, block_of(size)) for tokens, size, n in windows]
    padded = [replace(each, page=page) for each in states]
    return StockRoom(block_of(nbytes[0]), [page] * len(nbytes), 0, [*others, *padded])

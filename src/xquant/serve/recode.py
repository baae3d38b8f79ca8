"""Recoder: whole blocks of an engine's layers as a method for storage packs them, and back.

Letters: ``m`` blocks of ``n`` tokens; ``G`` key/value heads of size ``D``; ``W = 2 G D``; ``S`` sinks of the
method.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..methods import LayerCodec, Method
from ..past.angles import Angles
from ..past.paged import PagedPast
from ..past.tokens import look_up
from .coding import LayerCoder

Stored = dict[str, Tensor]
"""Of one block: ``packed`` uint8 ``[bytes]``, the fields of all layers after each other, and ``sinks``
``[layers, S, W]``, rotated keys beside values, of the first block of a sequence."""


class Blocks(NamedTuple):
    """Blocks that are in pages, or are to be."""

    pages: Tensor
    """Their numbers, ``[m]``."""
    starts: Tensor
    """The positions that they begin at, ``[m]``."""
    slots: Tensor | None
    """As of `PagedPast.write`."""
    ids: Tensor
    """Of their tokens, ``[m, n]``."""


class Recoder:
    """Packs the blocks that layers hold by a method for storage, and gives layers what was packed.

    Args:
        layers: bottom up.
        method: how blocks are stored; its blocks have as many tokens as a page.
        codecs: of the method, for each layer; None where it is the layers' own, and pages are stored as they
            are.
        angles: of each layer's rotary embedding; needed where a codec keeps keys before it.
    """

    def __init__(
        self,
        layers: Sequence[PagedPast],
        method: Method,
        codecs: Sequence[LayerCodec] | None,
        angles: Sequence[Angles | None],
    ) -> None:
        self._sink, self._row = method.sink, layers[0].row
        self._embedding = None if codecs is None else codecs[0].embedding
        self._ways: list[_Way] = [_AsItIs(layer, method) for layer in layers]
        if codecs is not None:
            each = zip(layers, codecs, angles, strict=True)
            self._ways = [_Repacked(layer, method, codec, own) for layer, codec, own in each]

    @property
    def nbytes(self) -> int:
        """Of a stored block, without sinks."""
        return sum(way.layout.packed_nbytes for way in self._ways)

    def pack(self, blocks: Blocks) -> list[Stored]:
        """What is stored of these blocks."""
        packed, sinks, below = [], [], None
        embedded = self._embedded(blocks)
        for way in self._ways:
            whole, kept, below = way.pack(blocks, below, embedded)
            packed.append(whole)
            sinks.append(kept)
        every, exact = torch.cat(packed, 1), torch.stack(sinks, 1)
        counts = [0 if start else self._sink for start in blocks.starts.tolist()]
        return [
            {"packed": every[i].clone(), "sinks": exact[i, :, :count].clone()}
            for i, count in enumerate(counts)
        ]

    def unpack(self, stored: Sequence[Stored], blocks: Blocks) -> None:
        """Write stored blocks to pages.

        Raises:
            ValueError: they are no blocks of these layers; nothing was written.
        """
        if not all(map(self.fits, stored, blocks.starts.tolist())):
            raise ValueError("it holds something else than the method stores")
        parts = torch.stack([each["packed"] for each in stored])
        dtype = stored[0]["sinks"].dtype
        exact = torch.zeros(len(stored), len(self._ways), self._sink, self._row, dtype=dtype, device="cpu")
        for own, each in zip(exact, stored, strict=True):
            own[:, : each["sinks"].shape[1]] = each["sinks"]
        below, start, embedded = None, 0, self._embedded(blocks)
        for place, way in enumerate(self._ways):
            packed = parts[:, start : start + way.layout.packed_nbytes]
            below = way.unpack(packed, exact[:, place], blocks, below, embedded)
            start += way.layout.packed_nbytes

    def _embedded(self, blocks: Blocks) -> Tensor | None:
        """What the method knows of the tokens by their ids, ``[1, m n, E]``."""
        return None if self._embedding is None else look_up(self._embedding, blocks.ids.flatten()[None])

    def fits(self, stored: Stored, start: int) -> bool:
        """Whether this is a block of these layers that begins at position ``start``."""
        if stored.keys() != {"packed", "sinks"} or stored["packed"].dtype != torch.uint8:
            return False
        shape = (len(self._ways), 0 if start else self._sink, self._row)
        return stored["packed"].shape == (self.nbytes,) and stored["sinks"].shape == shape


class _Way(ABC):
    """How one layer's blocks are stored."""

    def __init__(self, layer: PagedPast, method: Method) -> None:
        self.layer, self.block, self.sink = layer, method.group, method.sink
        self.layout = layer.layout

    @abstractmethod
    def pack(
        self, blocks: Blocks, below: Tensor | None, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The bytes ``[m, .]`` of these blocks; their sinks ``[m, S, W]``, of those that start a sequence;
        and what the layer above is predicted from, ``[m, n, .]``.

        Args:
            below: the same of the layer below.
            embedded: what is known of the tokens, ``[1, m n, E]``.
        """

    @abstractmethod
    def unpack(
        self,
        packed: Tensor,
        sinks: Tensor,
        blocks: Blocks,
        below: Tensor | None,
        embedded: Tensor | None,
    ) -> Tensor | None:
        """Write blocks to pages. Returns what the layer above is predicted from."""


class _AsItIs(_Way):
    """A page's own bytes."""

    def pack(
        self, blocks: Blocks, below: Tensor | None, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        packed, first = self.layer.packed(blocks.pages, blocks.slots)
        sinks = first.new_zeros(len(blocks.pages), self.sink, first.shape[2])
        if blocks.slots is not None:
            sinks[blocks.starts == 0] = first
        return packed, sinks, None

    def unpack(
        self,
        packed: Tensor,
        sinks: Tensor,
        blocks: Blocks,
        below: Tensor | None,
        embedded: Tensor | None,
    ) -> Tensor | None:
        self.layer.put(packed, blocks.pages, sinks[blocks.starts == 0], blocks.slots)
        return None


class _Repacked(_Way):
    """The blocks as attention reads them, packed anew."""

    def __init__(self, layer: PagedPast, method: Method, codec: LayerCodec, angles: Angles | None) -> None:
        super().__init__(layer, method)
        self._coder = LayerCoder(codec, method, angles, layer.packer)
        self.layout = self._coder.layout

    def pack(
        self, blocks: Blocks, below: Tensor | None, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = self.layer.blocks(blocks.pages, blocks.starts, blocks.slots)
        packed, above = self._coder.pack(rows, blocks.starts, below, embedded)
        return packed, rows[:, : self.sink], above

    def unpack(
        self,
        packed: Tensor,
        sinks: Tensor,
        blocks: Blocks,
        below: Tensor | None,
        embedded: Tensor | None,
    ) -> Tensor | None:
        rows, above = self._coder.unpack(packed, sinks, blocks.starts, below, embedded)
        self.layer.write(rows, blocks.pages, blocks.starts, blocks.slots)
        return above

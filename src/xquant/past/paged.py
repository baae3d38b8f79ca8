"""PagedPast: one attention layer of an engine, its past in pages and rings.

Letters: ``T`` new tokens of all sequences of a step, after each other; ``t`` those of one; ``n`` tokens of a
block; ``R`` places of a ring; ``H`` query heads, ``G`` key/value heads of size ``D``; ``W = 2 G D``.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..methods import LayerCodec
from ..quant.quantizer import as_written
from . import finite
from .angles import Angles, RotatedStates
from .exact import ExactAttention, Scoring, torch_attention
from .packer import Packer
from .pages import PageLayout, Pages
from .sequences import Sequences
from .step import Chunk, Chunks, Step

if TYPE_CHECKING:
    from ..kernels.backend import Backend
    from ..kernels.call import AttentionCall

_LOG = logging.getLogger(__name__)
_SLOTS = 16
"""Of sinks, beside as many as there are, when they are given more room."""


class PagedPast:
    """Attends over one layer, and keeps its keys and values.

    Args:
        codec: how the method packs this layer.
        block: tokens of a page.
        angles: of the layer's rotary embedding; needed where the codec keeps keys before it.
        backend: what reads pages in place; the reference decodes them.
        packer: what packs blocks.
        exact: attends for chunks of a prompt.
        sink: first tokens of a sequence that are read as they are.

    Raises:
        ValueError: the blocks of this codec have no page of one size.
    """

    def __init__(
        self,
        codec: LayerCodec,
        block: int,
        angles: Angles | None,
        backend: "Backend",
        packer: Packer,
        exact: ExactAttention = torch_attention,
        sink: int = 0,
    ) -> None:
        self.codec, self.block = codec, block
        self.layout = PageLayout(codec.segments, block)
        self._angles, self.packer, self._exact = angles, packer, exact
        self._rotated = RotatedStates(codec, angles)
        self._sink, self._bound = sink, (0, 0)
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._pool, self._rings, self.sinks = nothing, nothing, nothing
        """``[slots, S, W]``, as in rings."""
        own = None if angles is None else angles.paged(block)
        self._paged = backend.paged(codec, self.layout, own)

    @property
    def row(self) -> int:
        """``W``: what a ring keeps of a token, its rotated key and its value."""
        return 2 * self.codec.view.kv_width

    @property
    def in_place(self) -> bool:
        """Whether a kernel reads its pages, where a sequence has few new tokens."""
        return self._paged is not None

    def bind(self, pool: Tensor, rings: Tensor, capacity: int, moved: int = 0, slots: int = 0) -> None:
        """Keep the past in this memory of the engine: ``pool`` uint8 ``[N, ...]``, in which the page of each
        block begins ``moved`` bytes after its row, ``rings`` ``[M, ...]`` in the dtype of the model, each
        with ``capacity`` rows, ``R``. There is room for the sinks of ``slots`` sequences; more is made where
        more come. Does nothing where it is bound to it already."""
        memory = pool.data_ptr() + moved, rings.data_ptr()
        if memory == self._bound:
            return
        shape, strides = (len(pool), self.layout.nbytes), (pool.stride(0), 1)
        self._pool = pool.as_strided(shape, strides, pool.storage_offset() + moved)
        self._pages = Pages(self.layout, self._pool, self.packer)
        rows = rings.view(len(rings), -1)[:, : capacity * self.row]
        self._rings, self._bound = rows.unflatten(1, (capacity, self.row)), memory
        self.sinks = rings.new_zeros(slots, self._sink, self.row)
        self._bind_kernel()

    def _bind_kernel(self) -> None:
        if self._paged is not None:
            self._paged.bind(self._pool, self._rings, self.sinks)

    def attend(self, call: "AttentionCall", step: Step, out: Tensor) -> None:
        """Keep the new tokens, and attend; without gradients, as an engine runs.

        A sequence reads its own new tokens and those in its ring as they are, older ones from their pages.
        Whole blocks are sealed before anything is read: another sequence of the same step may share them.

        Args:
            call: states of all ``T`` tokens, without a mask.
            out: ``[T, H, D]``, written to.
        """
        decoding, chunks = step.readers(self.in_place)
        if step.filled is not None or chunks.each:
            rows = torch.cat([t.flatten(1) for t in call[1:3]], -1).to(self._rings.dtype)
            self.seal(rows, step)
        for sequences in decoding:
            self.attend_in_place(call, sequences, out)
        if chunks.each:
            states = [self.read(chunk, rows[chunk.new.start : chunk.new.stop]) for chunk in chunks.each]
            own, scoring = chunks.rows, Scoring(call.scaling, call.softcap or 0.0, call.sink_logits)
            found = self._exact(call.query[own].to(self._rings.dtype), states, chunks.counts, scoring)
            out[own] = found.to(out.dtype)
            # Last: a long ring may give the places of tokens that were read to new ones.
            self.write_rings(rows[chunks.kept], chunks)

    def attend_in_place(self, call: "AttentionCall", sequences: Sequences, out: Tensor) -> None:
        """`PagedAttention.attend`, where the layer is `in_place`; rings keep states in their own dtype."""
        assert self._paged is not None
        dtype = self._rings.dtype
        if not call.key.dtype == call.value.dtype == dtype:
            call = call._replace(key=call.key.to(dtype), value=call.value.to(dtype))
        with as_written(call.query):
            self._paged.attend(call, sequences, out)

    def write_rings(self, rows: Tensor, chunks: Chunks) -> None:
        """Put the rows ``[., W]`` of `Chunks.kept` into rings."""
        self._rings[chunks.places] = rows

    def seal(self, rows: Tensor, step: Step) -> None:
        """Pack the whole blocks of every sequence, of what rings hold and the new ``rows`` ``[T, W]``."""
        if (filled := step.filled) is not None:
            blocks = rows[filled.rows]
            begun = filled.begun
            rings = filled.rings[begun // self.block]
            blocks.flatten(0, 1)[begun] = self._rings[rings, filled.held.flatten()[begun]]
            self.write(blocks, filled.pages, filled.starts, filled.slots)

    def seal_held(self, step: Step) -> None:
        """The same where rings have all rows of these blocks, the new ones too.

        Raises:
            ValueError: NaN or infinity in one of them.
        """
        if (filled := step.filled) is not None:
            blocks = self._rings[filled.rings[:, None], filled.held]
            finite.check_rows(blocks, self.codec.view.index)
            self.write(blocks, filled.pages, filled.starts, filled.slots)

    def write(self, rows: Tensor, pages: Tensor, starts: Tensor, slots: Tensor | None) -> None:
        """Pack blocks ``[m, n, W]`` of rotated keys and values.

        Args:
            pages: int64 ``[m]``, where each goes.
            starts: int64 ``[m]``, the positions that they start at.
            slots: of the sinks of those that start a sequence; None where the method has none.
        """
        excluded = None if slots is None else self._keep_sinks(rows, starts == 0, slots)
        before = self._pages.dropped
        features = self._rotated.features(rows, starts)
        self._pages.write(pages, self.codec.encode(features[None], None)[0], excluded)
        if self._pages.dropped.bit_length() > before.bit_length():  # twice as many as were told of
            _LOG.warning(
                "xquant: layer %d: %d outliers had no room in pages, and are read as their codes",
                self.codec.view.index,
                self._pages.dropped,
            )

    def blocks(self, pages: Tensor, starts: Tensor, slots: Tensor | None) -> Tensor:
        """The inverse of `write`: what attention reads of pages, ``[m, n, W]`` in the dtype of rings."""
        states = (part.flatten(1) for part in self._decoded(pages, starts))
        rows = torch.cat([*states], -1).unflatten(0, (len(pages), self.block))
        if slots is not None:
            rows[starts == 0, : self._sink] = self.sinks[slots]
        return rows

    def packed(self, pages: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """What these pages hold, as bytes ``[m, .]``, and the sinks in these slots, ``[., S, W]``."""
        return self.layout.compact(self._pool[pages]), self.sinks[[] if slots is None else slots]

    def put(self, packed: Tensor, pages: Tensor, sinks: Tensor, slots: Tensor | None) -> None:
        """The inverse of `packed`."""
        self._pool[pages] = self.layout.spread(packed)
        if slots is not None:
            self._keep_sinks(sinks, torch.ones(len(sinks), dtype=torch.bool, device="cpu"), slots)

    def _decoded(self, pages: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of these pages, ``[m n, G, D]``; sinks as their codes."""
        rows = self._pages.read(pages, self._rings.dtype)
        recalled = self.codec.recall(rows.flatten(0, 1)[None], None, sealing=False)
        return self._rotated.states(recalled, starts)

    def _keep_sinks(self, blocks: Tensor, first: Tensor, slots: Tensor) -> Tensor | None:
        """Keep those of blocks ``[m, n, W]``, of which some are the ``first`` of their sequence, in these
        slots. Returns which tokens are sinks, bool ``[m, n]``; None where none is."""
        if not len(slots):
            return None
        if (most := int(slots.max())) >= len(self.sinks):
            more = self.sinks.new_zeros(most + _SLOTS, *self.sinks.shape[1:])
            self.sinks = torch.cat([self.sinks, more])
            self._bind_kernel()
        self.sinks[slots] = blocks[first, : self._sink]
        sinks = first[:, None] & (torch.arange(self.block, device=first.device) < self._sink)
        return sinks.to(blocks.device)

    def read(self, chunk: Chunk, new: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, ``[tokens, G, D]``, that the ``new`` rows of a sequence read."""
        width = self.codec.view.kv_width
        new = new[max(chunk.sealed - chunk.new.before, 0) :]
        exact = torch.cat([self._rings[chunk.places], new])
        keys, values = (self._heads(part) for part in exact.split(width, -1))
        if not len(chunk.pages):
            return keys, values
        starts = torch.arange(len(chunk.pages), device="cpu") * self.block
        old, older = self._decoded(chunk.pages, starts)
        if chunk.slot is not None:
            sinks = (self._heads(part) for part in self.sinks[chunk.slot].split(width, -1))
            old, older = (
                torch.cat([kept, coded[self._sink :]])
                for kept, coded in zip(sinks, (old, older), strict=True)
            )
        return torch.cat([old, keys]), torch.cat([older, values])

    def _heads(self, states: Tensor) -> Tensor:
        """``[..., G * D]`` to ``[tokens, G, D]``."""
        view = self.codec.view
        return states.reshape(-1, view.kv_heads, view.head_size)

"""ServedLayer: one attention layer of an engine, its past in pages and rings.

Letters: ``T`` new tokens of all sequences of a step, after each other; ``t`` those of one; ``n`` tokens of a
block; ``H`` query heads, ``G`` key/value heads of size ``D``; ``W = 2 G D``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..methods import LayerCodec
from ..store.packer import TORCH, Packer
from ..store.pages import PageLayout, Pages
from .rotary import Angles


class Run(NamedTuple):
    """The new tokens of one sequence in a step."""

    start: int
    """Its first row among the ``T``."""
    stop: int
    before: int
    """Tokens that the sequence had before."""


class Step(NamedTuple):
    """What one forward pass of an engine is about: the same for all layers."""

    runs: Sequence[Run]
    pages: Tensor
    """int ``[B, columns]``: the page of every block of each sequence."""


class ServedLayer:
    """Attends over one layer, and keeps its keys and values.

    Args:
        codec: how the method packs this layer.
        block: tokens of a page.
        scaling: of scores.
        angles: of the layer's rotary embedding; needed where the codec keeps keys before it.
        softcap: of scores; 0 for none.
        packer: what packs and unpacks blocks.

    Raises:
        ValueError: the blocks of this codec have no page of one size.
    """

    def __init__(
        self,
        codec: LayerCodec,
        block: int,
        scaling: float,
        angles: Angles | None = None,
        softcap: float = 0.0,
        packer: Packer = TORCH,
    ) -> None:
        assert codec.rotated or angles is not None
        self.codec, self.block = codec, block
        self.layout = PageLayout(codec.segments, block)
        self._scaling, self._softcap = scaling, softcap
        self._angles, self._packer = angles, packer
        self._memory: tuple[int, int] | None = None

    @property
    def row(self) -> int:
        """``W``: what a ring keeps of a token, its rotated key and its value."""
        return 2 * self.codec.view.kv_width

    def bind(self, pages: Tensor, rings: Tensor) -> None:
        """Keep the past in this memory of the engine: ``pages`` uint8 ``[N, layout.nbytes]`` or more,
        ``rings`` ``[M, n, W]`` in the dtype of the model. Does nothing where it is bound to it already."""
        memory = pages.data_ptr(), rings.data_ptr()
        if memory != self._memory:
            self._pages = Pages(self.layout, pages, self._packer)
            self._rings, self._memory = rings, memory

    @torch.no_grad()
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, step: Step, rings: Tensor, out: Tensor
    ) -> None:
        """Keep the new tokens, and attend.

        A sequence reads its own new tokens and those in its ring as they are, older ones from their pages.
        Whole blocks are sealed before anything is read: another sequence of the same step may share them.

        Args:
            query: ``[T, H, D]``.
            key: ``[T, G, D]``, rotated, as ``value``.
            rings: int ``[B]``, the ring of each sequence.
            out: ``[T, H, D]``, written to.
        """
        rows = torch.cat([key.flatten(1), value.flatten(1)], -1)
        recent = [
            self._keep(rows[run.start : run.stop], run, int(ring))
            for run, ring in zip(step.runs, rings.tolist(), strict=True)
        ]
        self._seal(recent, step)
        for run, table, exact in zip(step.runs, step.pages, recent, strict=True):
            keys, values = self._read(table[: run.before // self.block], exact)
            own = slice(run.start, run.stop)
            out[own] = self._attention(query[own], keys, values)

    def _keep(self, new: Tensor, run: Run, ring: int) -> Tensor:
        """Put ``new`` rows ``[t, W]`` into the ring, where they do not complete a block. Returns the rows of
        the block that was begun, and all after it."""
        held = run.before % self.block
        kept = self._rings[ring]
        rows = torch.cat([kept[:held], new])
        left = len(rows) % self.block
        if len(rows) < self.block:
            kept[held : len(rows)] = new
        elif left:
            kept[:left] = rows[-left:]
        return rows

    def _seal(self, recent: Sequence[Tensor], step: Step) -> None:
        """Pack the whole blocks of every sequence."""
        blocks, numbers, starts = [], [], []
        for run, table, rows in zip(step.runs, step.pages, recent, strict=True):
            whole, first = len(rows) // self.block, run.before // self.block
            if whole:
                blocks.append(rows[: whole * self.block].unflatten(0, (whole, self.block)))
                numbers.append(table[first : first + whole])
                starts.append(torch.arange(first, first + whole) * self.block)
        if blocks:
            self._pages.write(
                torch.cat(numbers).long(), self._packed(torch.cat(blocks), torch.cat(starts))
            )

    def _packed(self, blocks: Tensor, starts: Tensor) -> Tensor:
        """What is packed of blocks ``[m, n, W]`` that begin at positions ``starts`` ``[m]``."""
        if not self.codec.rotated:
            assert self._angles is not None
            key, value = blocks.split(self.codec.view.kv_width, -1)
            turned = self._angles.turn_back(self._heads(key), self._places(starts))
            blocks = torch.cat([turned.flatten(1).view_as(key), value], -1)
        return self.codec.encode(blocks[None], None)[0]

    def _read(self, pages: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, ``[tokens, G, D]``, of these pages and the ``exact`` rows after them."""
        width = self.codec.view.kv_width
        keys, values = (self._heads(part) for part in exact.split(width, -1))
        if not len(pages):
            return keys, values
        rows = self._pages.read(pages.long(), exact.dtype)
        recalled = self.codec.recall(rows.flatten(0, 1)[None], None, sealing=False)
        old, older = (self._heads(part[0]) for part in self.codec.rebuild(recalled))
        if not self.codec.rotated:
            assert self._angles is not None
            old = self._angles.turn(old, torch.arange(len(old)))
        return torch.cat([old, keys]), torch.cat([older, values])

    def _attention(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``[t, H, D]`` of the last ``t`` tokens over all, each over those up to itself."""
        new, tokens = len(query), len(keys)
        groups = query.shape[1] // keys.shape[1]
        seen = torch.ones(new, tokens, dtype=torch.bool).tril(tokens - new)
        queries, key, value = (t.transpose(0, 1)[None] for t in (query, keys, values))
        if not self._softcap:
            found = F.scaled_dot_product_attention(
                queries, key, value, seen, scale=self._scaling, enable_gqa=groups > 1
            )
            return found[0].transpose(0, 1)
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        scores = (queries.float() @ key.float().mT) * self._scaling
        scores = self._softcap * torch.tanh(scores / self._softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
        return (weights @ value)[0].transpose(0, 1)

    def _heads(self, states: Tensor) -> Tensor:
        """``[..., G * D]`` to ``[tokens, G, D]``."""
        view = self.codec.view
        return states.reshape(-1, view.kv_heads, view.head_size)

    def _places(self, starts: Tensor) -> Tensor:
        """Positions of the tokens of blocks that begin at ``starts``, ``[m * n]``."""
        return (starts[:, None] + torch.arange(self.block)).flatten()

"""An engine's own attention over chunks of prompts. It reads pages of its own kind: the states of all chunks
are laid into such pages, layer after layer in the same memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..models import AttentionView
from ..past.exact import Scoring, States
from ..past.step import Chunks

SCRATCH = 128
"""Tokens of a page."""


@dataclass(frozen=True)
class ChunkLayout:
    """Where the states of some sequences lie; the same for all layers that attend alike."""

    starts: Tensor
    """int32 ``[B + 1]``: the first query of each sequence, and the end of the last."""
    lengths: Tensor
    """int32 ``[B]``: tokens of each."""
    table: Tensor
    """int32 ``[B, columns]``: their pages."""
    slots: Tensor
    """int64: the place of every token in the pages, sequence after sequence."""
    pages: int
    plan: Any
    """What the engine makes of it."""


class EngineAttention(ABC):
    """An engine's functions. A cache is ``[pages, G, 2 * SCRATCH, D]``, keys first."""

    @abstractmethod
    def plan(self, starts: Tensor, lengths: Tensor) -> Any:
        """What it works out before it attends; ``starts`` and ``lengths`` as in `ChunkLayout`."""

    @abstractmethod
    def write(self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Put states ``[T, G, D]`` into these slots."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        at: ChunkLayout,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        """Causal attention of ``query`` ``[t, H, D]``, the newest tokens, into ``out`` of this shape."""


class OverPages:
    """`ExactAttention` by an engine's functions."""

    _memory: ClassVar[dict[Any, Tensor]] = {}  # by heads, their size and dtype: layers take it in turn

    def __init__(self, view: AttentionView, engine: EngineAttention) -> None:
        self._engine = engine
        self._shape = view.kv_heads, 2 * SCRATCH, view.head_size
        self._dtype = view.dtype
        self._kind = view.query_heads, *self._shape

    def __call__(
        self,
        query: Tensor,
        states: Sequence[States],
        chunks: Chunks,
        scoring: Scoring,
    ) -> Tensor:
        at: ChunkLayout | None = chunks.prepared.get(self._kind)
        if at is None:
            at = chunks.prepared[self._kind] = self._place([len(keys) for keys, _ in states], chunks)
        keys, values = (torch.cat(part) for part in zip(*states, strict=True))
        cache, out = self._cache(at.pages), torch.empty_like(query)
        self._engine.write(keys, values, cache, at.slots)
        self._engine.attend(query, cache, at, scoring, out)
        return out

    def _place(self, tokens: list[int], chunks: Chunks) -> ChunkLayout:
        lengths = torch.tensor(tokens, dtype=torch.int32, device="cpu")
        counts = [chunk.new.stop - chunk.new.start for chunk in chunks.each]
        starts = torch.tensor([0, *counts], device="cpu").cumsum(0).int()
        pages = (lengths + SCRATCH - 1) // SCRATCH
        first = pages.cumsum(0) - pages
        count = int(pages.sum())
        table = (first[:, None] + torch.arange(int(pages.max()), device="cpu")).clamp(max=count - 1)
        slots = [
            page * SCRATCH + torch.arange(n, device="cpu")
            for page, n in zip(first.tolist(), tokens, strict=True)
        ]
        plan = self._engine.plan(starts, lengths)
        return ChunkLayout(starts, lengths, table.int(), torch.cat(slots), count, plan)

    def _cache(self, pages: int) -> Tensor:
        key = self._shape, self._dtype
        held = self._memory.get(key)
        if held is None or len(held) < pages:
            held = self._memory[key] = torch.zeros(pages, *self._shape, dtype=self._dtype, device="cpu")
        return held

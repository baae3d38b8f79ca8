"""Stream: an append-only packed tensor of sealed blocks, addressed through a block table.

A block of ``n`` tokens is packed once and its bytes never change again. Sequences refer to blocks by
number, so reordering, selecting or repeating the batch (beam search, best-of-n) moves table entries,
not codes, and sequences that share a past share its blocks. Cropping into a block shortens it; what
remains keeps its codes.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .quant import Packed, Segment


class Stream:
    """Sealed blocks of one layer: ``[B, T, C]`` with ``C`` the sum of the segments' channels.

    Args:
        segments: the packed layout along the channels.
        block: tokens per block ``n``.
    """

    def __init__(self, segments: Sequence[Segment], block: int) -> None:
        self.segments = tuple(segments)
        self.block = block
        self.reset()

    def reset(self) -> None:
        self.pool: list[Packed] = []  # per segment: named tensors [N, ...], N resident blocks
        self.table: Tensor | None = None  # int64 [B, columns] into the pool
        self.lengths: list[int] = []  # valid tokens of each column of the table

    @property
    def tokens(self) -> int:
        """Tokens per sequence that are sealed."""
        return sum(self.lengths)

    @property
    def blocks(self) -> int:
        """Resident blocks; a block that several sequences share counts once."""
        return next(iter(self.pool[0].values())).shape[0] if self.pool else 0

    @property
    def nbytes(self) -> int:
        """Bytes that the packed tensors hold (the table is counted apart)."""
        return sum(t.nbytes for packed in self.pool for t in packed.values())

    @property
    def table_nbytes(self) -> int:
        return 0 if self.table is None else self.table.nbytes

    def block_nbytes(self) -> int:
        """Bytes of one block by the quantizers' formulas."""
        return sum(s.quantizer.nbytes(self.block, s.channels) for s in self.segments)

    def _pack(self, blocks: Tensor, excluded: Tensor | None) -> list[Packed]:
        parts = blocks.split([s.channels for s in self.segments], dim=-1)
        return [s.quantizer.encode(x, excluded) for s, x in zip(self.segments, parts, strict=True)]

    def _unpack(self, pool: list[Packed], tokens: int, dtype: torch.dtype) -> Tensor:
        count, device = next((t.shape[0], t.device) for t in pool[0].values())
        widths = [s.channels for s in self.segments]
        rows = torch.empty(count, tokens, sum(widths), dtype=dtype, device=device)
        parts = rows.split(widths, -1)
        for segment, packed, out in zip(self.segments, pool, parts, strict=True):
            segment.quantizer.decode(packed, out)
        return rows

    def seal(self, blocks: Tensor, excluded: Tensor | None = None) -> None:
        """Pack and append ``blocks`` ``[B, m, n, C]``; ``excluded`` bool ``[B, m, n]``, see `quant`."""
        batch, columns = blocks.shape[:2]
        flat = None if excluded is None else excluded.flatten(0, 1)
        new = self._pack(blocks.flatten(0, 1), flat)
        ids = self.blocks + torch.arange(batch * columns, device=blocks.device).view(batch, columns)
        if self.pool:
            self.pool = [
                {name: torch.cat([old[name], t]) for name, t in packed.items()}
                for old, packed in zip(self.pool, new, strict=True)
            ]
        else:
            self.pool = new
        self.table = ids if self.table is None else torch.cat([self.table, ids], 1)
        self.lengths += [self.block] * columns

    def read(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """The first ``tokens`` sealed rows, decoded: ``[B, tokens, C]`` in ``dtype``."""
        assert self.table is not None
        columns = next(j for j, end in enumerate(accumulate(self.lengths), 1) if end >= tokens)
        ids = self.table[:, :columns].flatten()
        pool = self.pool
        if not torch.equal(ids, torch.arange(self.blocks, device=ids.device)):
            pool = [{name: t[ids] for name, t in packed.items()} for packed in pool]
        rows = self._unpack(pool, self.block, dtype).unflatten(0, (-1, columns))
        if all(length == self.block for length in self.lengths[: columns - 1]):
            return rows.flatten(1, 2)[:, :tokens]
        parts = [rows[:, j, : self.lengths[j]] for j in range(columns)]
        return torch.cat(parts, 1)[:, :tokens]

    def roundtrip(self, rows: Tensor, excluded: Tensor | None = None) -> Tensor:
        """``rows`` ``[B, t, C]`` as they would read once sealed, without sealing them.

        They are cut into blocks from the first row on; the last block may be shorter.
        """
        out = []
        for start in range(0, rows.shape[1], self.block):
            part = rows[:, start : start + self.block]
            mask = None if excluded is None else excluded[:, start : start + self.block]
            out.append(self._unpack(self._pack(part, mask), part.shape[1], rows.dtype))
        return torch.cat(out, 1)

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` sealed tokens of every sequence."""
        if tokens >= self.tokens:
            return
        if tokens <= 0:
            return self.reset()
        kept: list[int] = []
        for length in self.lengths:
            if sum(kept) >= tokens:
                break
            kept.append(min(length, tokens - sum(kept)))
        self.lengths = kept
        assert self.table is not None
        self._refer(self.table[:, : len(kept)])

    def select(self, indices: Tensor) -> None:
        """Keep (or reorder, or repeat) the sequences ``indices``."""
        if self.table is not None:
            self._refer(self.table[indices.to(self.table.device)])

    def _refer(self, table: Tensor) -> None:
        """Use ``table`` from now on, and drop the blocks that it no longer names."""
        used, renumbered = table.unique(return_inverse=True)
        if used.numel() < self.blocks:
            self.pool = [{name: t[used] for name, t in packed.items()} for packed in self.pool]
            table = renumbered
        self.table = table

"""Stream: an append-only packed tensor of sealed blocks, addressed through a block table.

A block of ``n`` tokens is packed once and its bytes never change again. Sequences refer to blocks by
number, so reordering, selecting or repeating the batch (beam search, best-of-n) moves table entries,
not codes, and sequences that share a past share its blocks. Cropping into a block shortens it; what
remains keeps its codes.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ..quant import Packed, Ragged, Segment
from ..quant.quantizer import dense
from .packer import Packer
from .slabs import Slabs

Pool = dict[str, Slabs | Ragged]
State = tuple[list[Pool], Tensor | None, list[int], int, int]


class Offloader(Protocol):
    """Has the packed blocks of streams in host memory, see `offload`."""

    def bring(self, stream: "Stream") -> list[Pool]: ...

    def to_host(self, packed: list[Packed]) -> list[Packed]: ...


class Stream:
    """Sealed blocks of one layer: ``[B, T, C]`` with ``C`` the sum of the segments' channels.

    Args:
        segments: the packed layout along the channels.
        block: tokens per block ``n``.
        packer: what packs and unpacks blocks.
    """

    def __init__(self, segments: Sequence[Segment], block: int, packer: Packer) -> None:
        self.segments = tuple(segments)
        self.block, self.packer = block, packer
        self.source: Stream | None = None  # whose codes the shared segments use
        self.offloader: Offloader | None = None  # where blocks are kept in host memory
        self.version = 0  # changes whenever blocks do
        self.reset()

    def reset(self) -> None:
        self.version += 1
        self.pool: list[Pool] = []  # per segment: named fields of N resident blocks
        self.table: Tensor | None = None  # int64 [B, columns] into the pool
        self.lengths: list[int] = []  # valid tokens of each column of the table
        self.tokens = 0  # per sequence that are sealed: the sum of the lengths
        self.blocks = 0  # resident; one that several sequences share counts once

    @property
    def nbytes(self) -> int:
        """Bytes that the packed tensors hold (the table is counted apart)."""
        return sum(t.nbytes for packed in self.pool for t in packed.values())

    @property
    def table_nbytes(self) -> int:
        return 0 if self.table is None else self.table.nbytes

    @property
    def outliers(self) -> int:
        """Elements that are stored apart from their codes."""
        values = (packed.get("outlier_excess") for packed in self.pool)
        return sum(len(b) for v in values if isinstance(v, Ragged) for b in v.blocks)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the codebooks and offline scales that the blocks, if there are any, are read with."""
        return sum(s.quantizer.table_nbytes for s in self.segments) if self.pool else 0

    @property
    def here(self) -> list[Pool]:
        """The packed fields where they are read: the pool, or a copy of one in host memory."""
        return self.pool if self.offloader is None else self.offloader.bring(self)

    def unpack(self, pool: list[Packed], tokens: int, dtype: torch.dtype) -> Tensor:
        """Rows ``[N, tokens, C]`` of packed blocks with all their codes."""
        first = next(iter(pool[-1].values()))
        assert isinstance(first, Tensor)
        widths = [s.channels for s in self.segments]
        rows = torch.empty(len(first), tokens, sum(widths), dtype=dtype, device=first.device)
        parts = rows.split(widths, -1)
        for segment, packed, out in zip(self.segments, pool, parts, strict=True):
            self.packer.unpack(segment.quantizer, packed, out)
        return rows

    def seal(self, packed: list[Packed], batch: int) -> None:
        """Append blocks, packed in the order of ``[B, m]``."""
        self.version += 1
        count = len(next(iter(packed[0].values())))
        device = next(t for t in packed[0].values() if isinstance(t, Tensor)).device
        ids = self.blocks + torch.arange(count, device=device).view(batch, -1)
        if self.offloader is not None:
            packed = self.offloader.to_host(packed)
        if not self.pool:
            self.pool = [{name: _held(t) for name, t in new.items()} for new in packed]
        else:
            for old, new in zip(self.pool, packed, strict=True):
                for name, fields in new.items():
                    old[name] = _grown(old[name], fields)
        self.table = ids if self.table is None else torch.cat([self.table, ids], 1)
        self.lengths = self.lengths + [self.block] * ids.shape[1]
        self.tokens += self.block * ids.shape[1]
        self.blocks += count

    def gather(self, ids: Tensor) -> list[Packed]:
        """The packed blocks ``ids``, with shared codes; not to be written to."""
        pool = [{name: _read(t, ids) for name, t in fields.items()} for fields in self.here]
        if self.source is None:
            return pool
        return self.with_shared_codes(pool, self.source.gather(ids))

    def with_shared_codes(self, pool: list[Packed], held: list[Packed]) -> list[Packed]:
        """``pool`` with the codes of ``held``, those of the source layer, where a segment shares them."""
        return [
            # The source layer may be on another device.
            {**packed, "codes": dense(other, "codes").to(dense(packed, "scale").device)}
            if segment.shared
            else packed
            for segment, packed, other in zip(self.segments, pool, held, strict=True)
        ]

    def read(self, dtype: torch.dtype, tokens: int) -> Tensor:
        """The first ``tokens`` sealed rows, decoded: ``[B, tokens, C]`` in ``dtype``."""
        assert self.table is not None
        columns = next(j for j, end in enumerate(accumulate(self.lengths), 1) if end >= tokens)
        rows = self.read_blocks(dtype, self.table[:, :columns])
        if all(length == self.block for length in self.lengths[: columns - 1]):
            return rows.flatten(1, 2)[:, :tokens]
        parts = [rows[:, j, : self.lengths[j]] for j in range(columns)]
        return torch.cat(parts, 1)[:, :tokens]

    def read_blocks(self, dtype: torch.dtype, table: Tensor) -> Tensor:
        """The blocks ``[B, c]``, decoded: ``[B, c, n, C]``, with the tokens that were cropped off."""
        rows = self.unpack(self.gather(table.flatten()), self.block, dtype)
        return rows.unflatten(0, table.shape)

    def read_segment(self, number: int, dtype: torch.dtype, table: Tensor) -> Tensor:
        """The channels of one segment of these blocks, as by `read_blocks`."""
        segment, ids = self.segments[number], table.flatten()
        packed: Packed = {name: fields[ids] for name, fields in self.here[number].items()}
        shape = len(ids), self.block, segment.channels
        out = torch.empty(shape, dtype=dtype, device=table.device)
        self.packer.unpack(segment.quantizer, packed, out)
        return out.unflatten(0, table.shape)

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
        self.lengths, self.tokens = kept, tokens
        assert self.table is not None
        self._refer(self.table[:, : len(kept)])

    def select(self, indices: Tensor) -> None:
        """Keep (or reorder, or repeat) the sequences ``indices``."""
        if self.table is not None:
            self._refer(self.table[indices.to(self.table.device)])

    def _refer(self, table: Tensor) -> None:
        """Use ``table`` from now on, and drop the blocks that it no longer names."""
        self.version += 1
        used, renumbered = table.unique(return_inverse=True)
        if used.numel() < self.blocks:
            kept = used if self.offloader is None else used.cpu()
            self.pool = [{name: _held(t[kept]) for name, t in fields.items()} for fields in self.pool]
            table = renumbered
        self.table, self.blocks = table, used.numel()

    def snapshot(self) -> State:
        """What `restore` needs to bring back the blocks of now."""
        return self.pool, self.table, self.lengths, self.tokens, self.blocks

    def restore(self, state: State) -> None:
        """Be as at the time of a `snapshot`, also where sealing or selecting was interrupted since."""
        self.version += 1
        pool, self.table, self.lengths, self.tokens, self.blocks = state
        self.pool = [{name: t.first(self.blocks) for name, t in held.items()} for held in pool]


def _held(fields: Tensor | Ragged) -> Slabs | Ragged:
    return fields if isinstance(fields, Ragged) else Slabs(fields)


def _read(fields: Slabs | Ragged, ids: Tensor) -> Tensor | Ragged:
    return fields[ids] if isinstance(fields, Ragged) else fields.read(ids)


def _grown(old: Slabs | Ragged, new: Tensor | Ragged) -> Slabs | Ragged:
    """Blocks after each other; those that are there are not copied."""
    if isinstance(old, Ragged):
        assert isinstance(new, Ragged)
        return old + new
    assert isinstance(new, Tensor)
    old.append(new)
    return old

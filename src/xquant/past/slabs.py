"""Slabs: the packed blocks of one field, in memory that never moves."""

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GROWTH = 8
"""A new slab has room for an eighth of the blocks that are there, so that at most that much is reserved
and not used."""
HUGE_PAGE = 2 << 20


def _slab(blocks: Tensor, room: int) -> Tensor:
    """Memory for ``room`` blocks, the first of which are ``blocks``.

    Large slabs get pages of their own, huge ones where they fill them: a kernel that reads them once
    would wait for the page table, and the system has them back when they are dropped.
    """
    shape = (room, *blocks.shape[1:])
    size = room * blocks[0].nbytes
    plain = blocks.device.type == "cpu" and not blocks.is_pinned()
    if plain and size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Whole huge pages are asked for, which aligns them; what is not touched takes no memory.
        memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=private)
        memory.madvise(mmap.MADV_HUGEPAGE, 0, size // HUGE_PAGE * HUGE_PAGE)
        elements = size // blocks.itemsize
        slab = torch.frombuffer(memory, dtype=blocks.dtype, count=elements).view(shape)
    else:
        # Only pinned memory is copied to a GPU while that computes.
        slab = torch.empty(shape, dtype=blocks.dtype, device=blocks.device, pin_memory=blocks.is_pinned())
    slab[: len(blocks)] = blocks
    return slab


class Slabs:
    """Blocks ``[N, ...]`` that grow at the end without copying what is there; kernels read them by
    `addresses`."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, blocks: Tensor) -> None:
        self.slabs = [_slab(blocks, len(blocks))]
        self._used = len(blocks)  # of the last slab
        self._addresses: Tensor | None = None

    def __len__(self) -> int:
        return sum(map(len, self.slabs[:-1])) + self._used

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return len(self) * self.slabs[0][0].nbytes

    @property
    def itemsize(self) -> int:
        return self.slabs[0].itemsize

    @torch.inference_mode(False)  # what is made within it could not be written to outside
    @torch.no_grad()
    def append(self, blocks: Tensor) -> None:
        """Add ``blocks`` ``[m, ...]``."""
        self._addresses = None
        last = self.slabs[-1]
        fitting = min(len(last) - self._used, len(blocks))
        last[self._used : self._used + fitting] = blocks[:fitting]
        self._used += fitting
        if fitting < len(blocks):
            rest = blocks[fitting:]
            self.slabs.append(_slab(rest, max(len(rest), len(self) // GROWTH)))
            self._used = len(rest)

    def cut(self, count: int) -> None:
        """Drop all but the first ``count`` blocks, of at least one; none of them moves."""
        self._addresses = None
        start = 0
        for number, slab in enumerate(self.slabs):
            if start + len(slab) >= count:
                del self.slabs[number + 1 :]
                self._used = count - start
                return
            start += len(slab)

    def first(self, count: int) -> "Slabs":
        """The first ``count`` blocks, of at least one, in the same memory."""
        other = object.__new__(type(self))
        other.slabs, other._used = list(self.slabs), self._used
        other.cut(count)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slabs":
        return Slabs(self.whole().clone())

    def parts(self) -> list[Tensor]:
        """All blocks as they lie in memory, in order."""
        return [*self.slabs[:-1], self.slabs[-1][: self._used]]

    def whole(self) -> Tensor:
        """All blocks as one tensor; a copy where there are several slabs."""
        parts = self.parts()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __getitem__(self, blocks: Tensor) -> Tensor:
        return self.whole()[blocks]

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Slabs":
        """The same blocks where ``move`` puts them."""
        other = object.__new__(type(self))
        other.slabs, other._used = [move(part) for part in self.parts()], self._used
        other._addresses = None
        return other

    def read(self, blocks: Tensor) -> Tensor:
        """The blocks of these numbers ``[m]``; a view where they follow each other in one slab."""
        numbers, start = blocks.tolist(), 0
        first = numbers[0] if numbers else 0
        stop = first + len(numbers)
        if numbers == list(range(first, stop)):
            for slab in self.parts():
                if start <= first and stop <= start + len(slab):
                    return slab[first - start : stop - start]
                start += len(slab)
        found, start = self.slabs[0].new_empty(len(numbers), *self.slabs[0].shape[1:]), 0
        for slab in self.parts():
            here = (blocks >= start) & (blocks < start + len(slab))
            found[here] = slab[blocks[here] - start]
            start += len(slab)
        return found

    @property
    def addresses(self) -> Tensor:
        """Where each block lies, int64 ``[N]`` on the CPU."""
        if self._addresses is None:
            self._addresses = torch.cat(
                [
                    slab.data_ptr() + slab[0].nbytes * torch.arange(len(slab), device="cpu")
                    for slab in self.parts()
                ]
            )
        return self._addresses

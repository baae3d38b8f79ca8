"""Splits: how many programs share the blocks of a sequence, so that a device is busy and none takes long.

A device runs so many programs at a time, its slots; more come in waves. Fewer blocks a program end a wave
sooner, and more splits cost more: each loads the query, and writes sums that are combined later.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

FIXED = 2
"""What a program costs beside its blocks, in blocks: an estimate."""
MOST_PROGRAMS = 32
"""Of a multiprocessor."""
RESERVED = 1024
"""Bytes of shared memory that a device takes of each program."""


@lru_cache(4096)
def blocks_per_split(columns: int, programs: int, slots: int) -> int:
    """How many of ``columns`` blocks a program reads, where ``programs`` times the splits run in ``slots``:
    of the splits that take the least time, the fewest.

    What is kept exactly is a split of its own, and a short one: it is not counted.
    """

    def time(splits: int) -> int:
        return -(-programs * splits // slots) * (-(-columns // splits) + FIXED)

    return max(-(-columns // min(range(1, columns + 1), key=time, default=1)), 1)


class Limits(NamedTuple):
    """What a device has; threads and memory are those of one of its multiprocessors."""

    multiprocessors: int
    warp: int
    """Threads of a warp."""
    threads: int
    registers: int
    shared: int
    """Bytes of shared memory."""

    def slots(self, warps: int, registers: int, shared: int) -> int:
        """How many programs run at once that have so many ``warps``, ``registers`` a thread, and bytes of
        ``shared`` memory."""
        threads = warps * self.warp
        of_thread = -(-max(registers, 1) // 8) * 8  # as they are given out
        by_registers = self.registers // (threads * of_thread)
        by_shared = self.shared // (shared + RESERVED)
        most = min(by_registers, by_shared, self.threads // threads, MOST_PROGRAMS)
        return self.multiprocessors * max(most, 1)


@cache
def limits_of(device: torch.device) -> Limits:
    """Of a GPU."""
    known = torch.cuda.get_device_properties(device)
    return Limits(
        known.multi_processor_count,
        known.warp_size,
        known.max_threads_per_multi_processor,
        getattr(known, "regs_per_multiprocessor", 1 << 16),  # torch does not declare it
        known.shared_memory_per_multiprocessor,
    )

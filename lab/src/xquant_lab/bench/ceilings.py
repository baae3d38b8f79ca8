"""Limits of the machine: bandwidth and arithmetic, measured in the same run as the caches."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from xquant.kernels.cpu import library as native

from .clocks import synchronize

READ_BYTES = 512 << 20
COPY_BYTES = 2 << 30
"""Many times the L2 cache of any GPU."""
MATRIX = 8192
RUNS = 8


@dataclass(frozen=True)
class Ceilings:
    """Limits of one device; None is what was not measured."""

    read: float | None = None
    """Bytes a second that all threads of the CPU together read from memory."""
    copy: float | None = None
    """Bytes a second of a copy within a GPU's memory, read and written."""
    multiply: float | None = None
    """FLOPs a second of a large product in bf16."""


def ceilings(device: torch.device) -> Ceilings:
    """The limits that rows of this device are compared with."""
    if device.type == "cpu":
        return Ceilings(read=read_bandwidth())
    return Ceilings(copy=copy_bandwidth(device), multiply=matrix_rate(device))


def as_row(device: torch.device) -> dict[str, Any]:
    """`ceilings`, and the facts of a GPU, as a row of results."""
    row: dict[str, Any] = {"device": str(device), **asdict(ceilings(device))}
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        row |= {
            "name": known.name,
            "memory_bytes": known.total_memory,
            "multiprocessors": known.multi_processor_count,
            "capability": f"{known.major}.{known.minor}",
            "cuda": torch.version.cuda,
        }
    return row


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory; the best of a few runs."""
    block = torch.ones(READ_BYTES // 4, dtype=torch.float32, device="cpu")
    read = native.reader()
    best = 0.0
    for _ in range(RUNS):
        start = time.perf_counter()
        if read is None:
            block.sum()
        else:
            read(block)
        best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


def copy_bandwidth(device: torch.device, nbytes: int = COPY_BYTES) -> float:
    """Bytes a second, read and written, of a copy of ``nbytes``; the best of a few runs."""
    source = torch.ones(nbytes // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _shortest(lambda: target.copy_(source), device)


def matrix_rate(device: torch.device, size: int = MATRIX) -> float:
    """FLOPs a second of the product of two bf16 matrices ``[size, size]``; the best of a few runs. They hold
    random numbers, since zeros multiply faster."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _shortest(lambda: torch.mm(left, right, out=out), device)


def _shortest(job: Callable[[], Any], device: torch.device) -> float:
    """The least seconds of a few runs of ``job``, which must take much longer than its launch."""
    taken = []
    for _ in range(RUNS):
        synchronize(device)
        start = time.perf_counter()
        job()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)

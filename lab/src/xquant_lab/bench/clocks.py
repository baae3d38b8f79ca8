"""Clocks that time a job: by the host's clock, or on a GPU by CUDA events."""

import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

Job = Callable[[], None]

FLUSH_BYTES = 1 << 30
"""Many times the L2 cache of any GPU. Reading so much before a job evicts the job's own data from it."""


class Clock(Protocol):
    """Times one job by running it twice. The first run refills the CPU cache that the other contenders
    evicted; only the second is timed. While a model decodes, the step before used the same KV cache,
    too."""

    how: str

    def settle(self) -> None:
        """Called once, before the first timing: makes the job as fast as it can be."""

    def __call__(self) -> float:
        """Seconds that the job took."""
        ...


class HostClock:
    """The time that the host waits for the job, launches included."""

    how = "the host's clock"

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device

    def settle(self) -> None:
        pass

    def __call__(self) -> float:
        self._job()
        synchronize(self._device)
        start = time.perf_counter()
        self._job()
        synchronize(self._device)
        return time.perf_counter() - start


class GraphClock:
    """The time that a GPU works on the job, from a cold L2 cache.

    The kernels are captured once as a graph and replayed, since Python takes longer to launch them than they
    run. Where they cannot be captured, Python launches the job every time, and ``how`` says why.
    """

    how = "CUDA events, launched by Python: not yet captured"

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = self._run = job
        self._device = device

    def settle(self) -> None:
        before = torch.cuda.current_stream(self._device)
        self._job()  # compiles kernels, and allocates what later runs reuse
        try:
            graph = capture(self._job, self._device)
        except Exception as error:
            self.how = f"CUDA events, launched by Python: {reason(error)}"
        else:
            self._run, self.how = graph.replay, "CUDA events, replaying a graph"
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream behind

    def __call__(self) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run()
        # While the GPU reads that, the host queues the kernels that are timed.
        _flushing(self._device).sum()
        start.record()
        self._run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def capture(job: Job, device: torch.device) -> torch.cuda.CUDAGraph:
    """The kernels that ``job`` launches, as a graph.

    Memory that the job allocates belongs to the graph. All other memory that it reads must stay where it is.

    Raises:
        RuntimeError: the job waits for the device, or a library cannot be captured; also whatever the job
            raises itself.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # A failed capture leaves torch in a bad state, so a job that waits for the device is found before.
        torch.cuda.set_sync_debug_mode("error")
        try:
            job()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        job()
    return graph


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason(error: BaseException) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


@cache
def _flushing(device: torch.device) -> Tensor:
    return torch.ones(FLUSH_BYTES // 4, device=device, dtype=torch.float32)

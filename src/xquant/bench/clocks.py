"""How long a job takes: by the host's clock, or on a GPU by its own."""

import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

Job = Callable[[], None]

FLUSH_BYTES = 1 << 30
"""Many times the L2 cache of any GPU: read before a job, they leave nothing of it there."""


class Clock(Protocol):
    """Runs one job twice at a time; the second time counts. The first brings back what others drove out:
    when decoding, the step before was one of the same cache, not of one that moved gigabytes."""

    how: str

    def settle(self) -> None:
        """Before the first time: do what makes the job as fast as it can be."""

    def __call__(self) -> float:
        """Seconds."""
        ...


class HostClock:
    """What the host waits for the job, launches included."""

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
    """What a GPU works on the job, with nothing of it in the L2 cache: its kernels are captured once and
    replayed, since Python takes longer to launch them than they run. Where that cannot be done the job is
    launched again and again, and ``how`` says why."""

    how = "CUDA events, launched by Python: not yet captured"

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = self._run = job
        self._device = device

    def settle(self) -> None:
        before = torch.cuda.current_stream(self._device)
        self._job()  # compiles, and makes what later runs find
        try:
            graph = capture(self._job, self._device)
        except Exception as error:
            self.how = f"CUDA events, launched by Python: {reason(error)}"
        else:
            self._run, self.how = graph.replay, "CUDA events, replaying a graph"
        finally:
            torch.cuda.set_stream(before)  # a capture that failed leaves its own

    def __call__(self) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run()
        # While that is read, the host gets ahead with what is to be timed.
        _flushing(self._device).sum()
        start.record()
        self._run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def capture(job: Job, device: torch.device) -> torch.cuda.CUDAGraph:
    """The kernels that ``job`` launches, as a graph. What it allocates belongs to the graph; all else that
    it reads must stay where it is.

    Raises:
        RuntimeError: the job asks the device for something, or a library refuses; other errors that the job
            raises.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # torch is not itself again after a capture that failed, so what waits is found before.
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
    return torch.ones(FLUSH_BYTES // 4, device=device)

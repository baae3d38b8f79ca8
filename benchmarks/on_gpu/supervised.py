"""The worker as `benchmarks/gpu.py` sees it: a process that may hang or die."""

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from .worker import serve

GRACE = 10.0
"""Seconds that a stage may take beyond its own: it looks at the time between two rows."""
START = 30.0
"""Seconds for a new process, which imports torch."""


class Worker:
    """Started when it is wanted, and again after it was lost."""

    def __init__(self, output: Path, device: str, quick: bool) -> None:
        self._asked = output, device, quick
        self._process: BaseProcess | None = None

    def do(self, stage: str, seconds: float) -> str:
        """What became of a stage."""
        allowed = seconds + GRACE
        if self._process is None:
            self._start()
            allowed += START
        assert self._process is not None
        try:
            self._pipe.send((stage, seconds))
            if self._pipe.poll(allowed):
                outcome: str = self._pipe.recv()
                return outcome
        except (EOFError, OSError):  # it is no longer there
            self._process.join()
            status, self._process = self._process.exitcode, None
            return f"failed: its process ended with status {status}"
        self._process.kill()
        self._process.join()
        self._process = None
        return f"failed: stopped after {allowed:.0f} s"

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, other = spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(other, *self._asked))
        self._process.start()
        other.close()  # so that the end of the process is the end of the pipe

    def close(self) -> None:
        """End it, so that its memory is free."""
        if self._process is not None:
            self._pipe.send(None)
            self._process.join(GRACE)
            self._process.kill()
            self._process = None

"""Has the CPU taken for a GPU: Triton's kernels run in its interpreter, and the host's clock is read."""

from typing import Any

import pytest
import torch

from support import triton_interpreter
from xquant_lab.bench import capacity, run, trials
from xquant_lab.bench.clocks import HostClock

ROOM = 10**9


def take_for_a_gpu() -> None:
    """For the rest of this process."""
    triton_interpreter.mend()
    patched: Any = pytest.MonkeyPatch()
    triton_interpreter.take_for_a_gpu(patched)
    patched.setattr(trials, "on_cpu", trials.on_gpu)
    patched.setattr(run, "measure_on_cpu", run.measure_on_gpu)
    patched.setattr(run, "GraphClock", HostClock)
    patched.setattr(capacity, "free_bytes", lambda device: ROOM)
    torch.set_num_threads(1)

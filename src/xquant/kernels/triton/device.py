"""How kernels are started: on the device of their tensors, which need not be the current one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..splits import limits_of

UNKNOWN = 8
"""Slots of what is interpreted."""


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Within it a GPU is the current device, on which Triton compiles and starts."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def start(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start a kernel on ``device``, where its tensors are. Nothing else starts one."""
    with made_current(device):
        kernel[grid](*args, **constants)


class Slots:
    """How many programs of a kernel ``device`` runs at once, by what the kernel is compiled for."""

    def __init__(self, kernel: Any, device: torch.device) -> None:
        self._kernel, self._device = kernel, device
        self._found: dict[tuple[Any, ...], int] = {}

    def of(self, *args: Any, **constants: Any) -> int:
        """Of the kernel that `start` would start with these: the first time it is compiled for that."""
        key = tuple(constants.values())
        if key not in self._found:
            self._found[key] = self._asked(args, constants)
        return self._found[key]

    def _asked(self, args: tuple[Any, ...], constants: dict[str, Any]) -> int:
        if self._device.type != "cuda":
            return UNKNOWN
        with made_current(self._device):
            compiled = self._kernel.warmup(*args, grid=(1,), **constants)
            if compiled is None:  # it is interpreted
                return UNKNOWN
            _ = compiled.run  # loads it, which tells its registers
        known = compiled.metadata
        return limits_of(self._device).slots(known.num_warps, compiled.n_regs, known.shared)

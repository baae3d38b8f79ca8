"""Workspace: memory that kernels leave their splits in, until they are combined."""

import torch
from torch import Tensor

ALIGNED = 64
"""fp32 numbers of which each run takes a multiple, so that a kernel may load 16 bytes at once from its
beginning."""


class Workspace:
    """fp32 memory by device. Every layer takes it again: one stream runs them one after the other."""

    def __init__(self) -> None:
        self._held: dict[torch.device, Tensor] = {}

    def take(self, device: torch.device, *sizes: int) -> list[Tensor]:
        """Runs of at least these ``sizes``, of fp32 numbers."""
        whole = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        held, wanted = self._held.get(device), sum(whole)
        if held is None or len(held) < wanted:
            # Twice what is asked for: it grows with the context, a split at a time.
            held = self._held[device] = torch.empty(2 * wanted, dtype=torch.float32, device=device)
        return list(held[:wanted].split(whole))


class Unshared(Workspace):
    """Memory of torch's allocator for every call, which gives a CUDA graph memory that stays its own."""

    def take(self, device: torch.device, *sizes: int) -> list[Tensor]:
        return [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]

"""Noted: numbers by index that the host writes, and that a device reads without the host."""

import numpy as np
import torch
from torch import Tensor

from .sequences import Numbers


class Noted:
    """A table of ``W`` numbers to an index; zeros where nothing was noted.

    Args:
        width: ``W``.
    """

    def __init__(self, width: int) -> None:
        self._table = np.zeros((1, width), np.int32)  # the last row stays 0
        self._there: Tensor | None = None  # the same on a device

    def note(self, index: int, *numbers: int) -> None:
        """Replace the numbers of an index."""
        if (more := index + 2 - len(self._table)) > 0:
            self._table = np.pad(self._table, ((0, more + len(self._table)), (0, 0)))
            self._there = None
        self._table[index] = numbers
        if self._there is not None:
            self._there[index].copy_(torch.from_numpy(self._table[index]))

    def of(self, indices: Numbers) -> Numbers:
        """int32 ``[B, W]``: those of ``indices`` ``[B]``, where these are."""
        last = len(self._table) - 1
        if not isinstance(indices, Tensor):
            return self._table[np.minimum(indices, last)]
        if self._there is None or self._there.device != indices.device:
            self._there = self._copied(indices.device)
        return self._there[indices.clamp(max=last).long()]

    @torch.inference_mode(False)  # what is made within it could not be written to outside
    def _copied(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self._table.copy()).to(device)

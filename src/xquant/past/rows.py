"""GrowingRows: rows of recent tokens, to which new ones are added without copying those that are there."""

import torch
from torch import Tensor

ROOM = 16
"""Rows that memory has room for beyond those that are there, when it is taken."""


class GrowingRows:
    """Adds rows behind rows. What was given out stays as it is: memory behind it is written to once.

    So whoever holds rows, as a snapshot does, may go on from them. They are copied first where others were
    added behind them since.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the memory, where the rows are no longer those that were given out last."""
        self._memory: Tensor | None = None
        self._newest: Tensor | None = None

    def extended(self, rows: Tensor | None, new: Tensor) -> Tensor:
        """``rows`` ``[B, T, W]``, if there are any, and ``new`` ``[B, t, W]`` after them, in a type that
        holds both."""
        held = 0 if rows is None else rows.shape[1]
        length, memory = held + new.shape[1], self._memory
        known = memory is not None and rows is self._newest and new.dtype == memory.dtype
        if memory is None or not known or length > memory.shape[1]:
            dtype = new.dtype if rows is None else torch.promote_types(rows.dtype, new.dtype)
            with torch.inference_mode(False):  # what is made within it could not be written to outside
                memory = new.new_empty(new.shape[0], length + ROOM, new.shape[2], dtype=dtype)
            if rows is not None:
                memory[:, :held] = rows
            self._memory = memory
        memory[:, held:length] = new
        self._newest = memory[:, :length]
        return self._newest

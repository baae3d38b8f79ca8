"""Sinks: the first tokens of a sequence, kept as they are beside the blocks that they were sealed in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.affine import FP16_MAX


@dataclass(frozen=True)
class Sinks:
    """The sealed sinks of one layer, ``S`` to a sequence. A change makes another, so a snapshot may keep
    this one."""

    rows: Tensor
    """Their features ``[B, S, W]``."""
    columns: Tensor
    """int32 ``[B, S]``: where each stands among the tokens; -1 where it is not sealed yet."""

    @classmethod
    def none_yet(cls, count: int, like: Tensor, dtype: torch.dtype | None) -> "Sinks":
        """Room for ``count`` sinks of each sequence of features ``like`` ``[B, t, W]``, in ``dtype`` or in
        theirs."""
        shape = (like.shape[0], count)
        columns = torch.full(shape, -1, dtype=torch.int32, device=like.device)
        return cls(like.new_zeros(*shape, like.shape[2], dtype=dtype or like.dtype), columns)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.columns.nbytes

    @classmethod
    def standing(cls, rows: Tensor, sink: Tensor, sealed: int) -> "Sinks":
        """The sinks with these features ``[B, S, W]`` that stand among the first ``sealed`` tokens; ``sink``:
        which of all tokens are sinks, bool ``[B, T]``."""
        sink = sink.to(rows.device)
        sequence, column = sink[:, :sealed].nonzero(as_tuple=True)
        columns = torch.full(rows.shape[:2], -1, dtype=torch.int32, device=rows.device)
        columns[sequence, (sink.cumsum(1) - 1)[sequence, column]] = column.int()
        return cls(rows, columns)

    def kept(self, rows: Tensor, start: int, sink: Tensor) -> "Sinks":
        """With the sinks among the features ``rows`` ``[B, t, W]`` of the tokens from ``start`` on;
        ``sink``: which of all tokens are sinks, bool ``[B, T]``."""
        sink = sink.to(rows.device)
        rank = sink.cumsum(1) - 1
        sequence, column = sink[:, start : start + rows.shape[1]].nonzero(as_tuple=True)
        slot = rank[sequence, column + start]
        return Sinks(
            self.rows.index_put((sequence, slot), self._as_kept(rows[sequence, column])),
            self.columns.index_put((sequence, slot), (column + start).int()),
        )

    def _as_kept(self, rows: Tensor) -> Tensor:
        if self.rows.dtype == torch.float16:
            rows = rows.clamp(-FP16_MAX, FP16_MAX)
        return rows.to(self.rows.dtype)

    def placed(self, rows: Tensor, exact: Tensor) -> Tensor:
        """``rows`` ``[B, T, .]`` with those of ``exact`` ``[B, S, .]`` where the sinks stand, in the dtype of
        ``rows``: under autocast the two differ."""
        sequence, slot = ((self.columns >= 0) & (self.columns < rows.shape[1])).nonzero(as_tuple=True)
        column = self.columns[sequence, slot].long()
        return rows.index_put((sequence, column), exact[sequence, slot].to(rows.dtype))

    def cropped(self, tokens: int) -> "Sinks":
        """Without those past the first ``tokens``."""
        return Sinks(self.rows, self.columns.masked_fill(self.columns >= tokens, -1))

    def selected(self, indices: Tensor) -> "Sinks":
        """Of the sequences ``indices``."""
        return Sinks(self.rows[indices.to(self.rows.device)], self.columns[indices.to(self.columns.device)])

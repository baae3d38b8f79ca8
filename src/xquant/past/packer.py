"""Packer: turns blocks of cached tokens into codes and back.

The store packs each block once, when it is full, and unpacks it at every read that no kernel answers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..methods.codec import by_block
from ..quant import Packed, Quantizer, Segment
from ..quant.quantizer import as_written


class Packer:
    """Packs blocks as their quantizers do, in torch.

    A backend derives its own packer (`kernels/cpu/sealing.py`, `kernels/triton`) and overrides what it does
    faster. It must write the same bytes. Only the sign of a zero point of 0 may differ: of -0 and 0, torch
    takes either for the lowest. Caches share packers, so one keeps nothing of a cache.

    Letters: ``N`` blocks of ``n`` tokens and ``C`` channels, all on one device.
    """

    def pack(self, quantizer: Quantizer, x: Tensor, excluded: Tensor | None) -> Packed:
        """The packed fields of blocks ``x`` ``[N, n, C]``, as `Quantizer.encode` gives them.

        Args:
            excluded: bool ``[N, n]``: tokens that set no range, sinks and padding. None: all tokens do.

        Raises:
            ValueError: ``x`` holds NaN in a token that sets a range.
        """
        with as_written(x):
            return quantizer.encode(x, excluded)

    def pack_segments(
        self, segments: Sequence[Segment], rows: Tensor, excluded: Tensor | None
    ) -> list[Packed]:
        """The packed fields of every segment of blocks ``rows`` ``[N, n, C]``; see `pack`."""
        parts = rows.split([segment.channels for segment in segments], -1)
        found: list[Packed] = []
        for i, (segment, own) in enumerate(zip(segments, parts, strict=True)):
            if segment.predictor is not None:
                before = torch.empty(parts[i - 1].shape, dtype=torch.float32, device=rows.device)
                self.unpack(segments[i - 1].quantizer, found[-1], before)
                with as_written(rows):
                    predicted = by_block(before.flatten(0, 1)[None], segment.predictor, before.shape[1])
                own = own - predicted.view_as(own)
            found.append(self.pack(segment.quantizer, own, excluded))
        return found

    def unpack(self, quantizer: Quantizer, packed: Packed, out: Tensor) -> None:
        """Decode blocks into ``out`` ``[N, n, C]``, which gives the dtype. It may be a slice along ``C`` of a
        wider tensor."""
        with as_written(out):
            quantizer.decode(packed, out)

    def joins(self, quantizer: Quantizer, x: Tensor) -> bool:
        """Whether the store should stack ``x`` with the blocks that other layers seal at the same time, and
        call `pack` once. On a GPU that saves launches. Here it would only copy."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packer":
        """A copied cache shares its packer."""
        return self


TORCH = Packer()
"""The packer where no backend has one of its own."""

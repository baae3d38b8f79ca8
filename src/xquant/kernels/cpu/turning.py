"""How the library applies RoPE to keys that it rebuilds, in the order of its pairs: csrc/turning.h."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...models import AttentionView
from ..rope import BlockAngles
from ..slow import SlowPairs, slow_pairs
from . import library as native
from .attention import Angles, Kernel, batch_stride

ROWS = 8
"""As BUILT_ROWS in csrc/turning.h."""
SLOW_LIMIT = 8191
"""As in csrc/turning.h."""


def filled(size: int) -> int:
    """Channels of a head up to a multiple of `ROWS`."""
    return -(-size // ROWS) * ROWS


def in_pairs(view: AttentionView, rows: Tensor) -> Tensor:
    """Rows ``[G * D, ...]`` as fp32 ``[G, D, ...]``, those of a head in the order of their pairs."""
    channels = torch.arange(view.head_size, device=rows.device)
    rotated, rest = channels[: view.rotary_size], channels[view.rotary_size :]
    order = torch.cat([rotated.view(2, -1).T.flatten(), rest])
    return rows.float().unflatten(0, (view.kv_heads, -1))[:, order]


class RebuildingKernel(Kernel):
    """What kernels share that rebuild keys.

    Args:
        turning: the field that says how RoPE rotates them.
    """

    angles_by_token = True

    def __init__(
        self,
        to: native.Attend,
        sources: dict[int, Any],
        view: AttentionView,
        block: int,
        turning: native.Turning,
    ) -> None:
        super().__init__(to, sources, view, block)
        self._view, self._turning = view, turning
        self._angles: Angles | None = None
        turning.rotary_pairs = view.rotary_size // 2

    def set_angles(self, angles: Angles) -> None:
        self._angles, self._rows = angles, 0

    def _point_to_angles(self) -> None:
        """Point to the angles, and to weights that suit the query rows of a key/value head."""
        rows = self.to.group_heads * self.to.queries
        if self._angles is None or rows == self._rows:
            return
        self._rows, to = rows, self._turning
        to.built, to.waves = filled(self._view.head_size), 0
        to.start_cos = to.start_sin = None
        slow = None
        if isinstance(self._angles, BlockAngles):
            within, start = self._angles
            to.start_cos, to.start_sin = (native.address(t, torch.float32, *start[0].shape) for t in start)
            to.start_batch = batch_stride(start[0])
            if self.to.queries == 1:
                slow = slow_pairs(within, self._view.head_size, rows)
            if "by pair" not in within.prepared:
                within.prepared["by pair"] = tuple(t.T[None].contiguous() for t in within.angles)
            cos, sin = within.prepared["by pair"]
        else:
            cos, sin = self._angles
        to.cos, to.sin = (native.address(t, torch.float32, *cos.shape, rows=True) for t in (cos, sin))
        to.rope_batch, to.rope_channel = batch_stride(cos), cos.stride(1)
        if slow is not None:
            to.built, to.waves = slow.built, len(slow.wave)
            to.wave, to.wave_cos, to.wave_sin = (t.data_ptr() for t in slow[1:])
        self._use_weights(slow)

    @abstractmethod
    def _use_weights(self, slow: SlowPairs | None) -> None:
        """Point to the weights of keys, those of ``slow`` pairs apart."""

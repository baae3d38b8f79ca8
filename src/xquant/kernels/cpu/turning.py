"""How the library turns the keys that it rebuilds, in the order of the pairs of RoPE: csrc/turning.h."""

import torch
from torch import Tensor

from ...models import AttentionView
from ...models.rotation import Pair
from ..paged import PagedAngles
from ..rope import BlockAngles
from ..slow import SlowPairs, slow_pairs
from . import library as native

ROWS = 8
"""As BUILT_ROWS in csrc/turning.h."""
SLOW_LIMIT = 8191
"""As in csrc/turning.h."""

Angles = Pair | BlockAngles
"""Of every token ``[B, R/2, T]``, ``B`` may be 1; or of blocks."""


def filled(size: int) -> int:
    """Channels of a head up to a multiple of `ROWS`."""
    return -(-size // ROWS) * ROWS


def in_pairs(view: AttentionView, rows: Tensor) -> Tensor:
    """Rows ``[G * D, ...]`` as fp32 ``[G, D, ...]``, those of a head in the order of their pairs."""
    channels = torch.arange(view.head_size, device=rows.device)
    turned, rest = channels[: view.rotary_size], channels[view.rotary_size :]
    order = torch.cat([turned.view(2, -1).T.flatten(), rest])
    return rows.float().unflatten(0, (view.kv_heads, -1))[:, order]


def of_pages(angles: PagedAngles) -> BlockAngles:
    """The angles of any sequence of an engine."""
    cos, sin = (t[None] for t in angles.starts)
    return BlockAngles(angles.within, (cos, sin))


def batch_stride(of: Tensor) -> int:
    return of.stride(0) if len(of) > 1 else 0


def point_to_angles(
    to: native.Turning, view: AttentionView, angles: Angles, rows: int
) -> SlowPairs | None:
    """Point to the angles of packed keys, which the caller keeps.

    Returns:
        the slow pairs, where ``rows`` query rows of a key/value head are answered through them.
    """
    to.rotary_pairs, to.built, to.waves = view.rotary_size // 2, filled(view.head_size), 0
    to.start_cos = to.start_sin = None
    slow = None
    if isinstance(angles, BlockAngles):
        within, start = angles
        to.start_cos, to.start_sin = (
            native.address(t, torch.float32, *start[0].shape) for t in start
        )
        to.start_batch = batch_stride(start[0])
        if rows == view.query_heads // view.kv_heads:
            slow = slow_pairs(within, view.head_size, rows)
        if "by pair" not in within.prepared:
            within.prepared["by pair"] = tuple(t.T[None].contiguous() for t in within.angles)
        cos, sin = within.prepared["by pair"]
    else:
        cos, sin = angles
    to.cos, to.sin = (native.address(t, torch.float32, *cos.shape, rows=True) for t in (cos, sin))
    to.rope_batch, to.rope_channel = batch_stride(cos), cos.stride(1)
    if slow is not None:
        to.built, to.waves = slow.built, len(slow.wave)
        to.wave, to.wave_cos, to.wave_sin = (t.data_ptr() for t in slow[1:])
    return slow

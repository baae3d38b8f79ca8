"""Which pairs of a head RoPE rotates so little within a block that few functions of the place describe it.

A query that attends to a block needs its keys rotated by ``R(r)``, ``r`` the place in the block. Of
pairs of low frequency, ``cos(r w_j)`` and ``sin(r w_j)`` are nearly sums of a few waves ``u_k(r)``. For every
query row and wave there is one row ``v_k`` of the channels that keys come from, so that ``sum_k u_k(r) (v_k
x_r)`` is their part of the score. Where these rows are fewer than the channels of the pairs, they are what is
multiplied with ``x_r``.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..past.angles import Within
from ..threads import one_thread

TOLERANCE = 1e-4
"""Of cos and sin, root mean square over the places of a block."""
MULTIPLE = 8
"""Of rows that are multiplied with the codes at a time, as BUILT_ROWS in cpu/csrc/rebuild.h."""
LANES = 16
"""What vectors of pairs are filled up to a multiple of."""
LEAST_GAIN = 0.1
"""The part of all rows that has to be saved."""


class SlowPairs(NamedTuple):
    """Of heads of ``D`` channels, with pairs in the order of their frequencies, channels without one last."""

    built: int
    """Channels of the pairs before the slow ones, whose keys are built as they are."""
    wave: Tensor
    """fp32 ``[K, n]``."""
    cos: Tensor
    """fp32 ``[K, width]``: what waves are multiplied with, of every slow pair, then zeros up to `LANES`."""
    sin: Tensor


def slow_pairs(within: Within, size: int, rows: int) -> SlowPairs | None:
    """The slow pairs of heads of ``size`` channels for so many query rows of one; None where rows
    would not become fewer."""
    name = f"slow {size} {rows}"
    if name not in within.prepared:
        tables = (t.cpu().float().contiguous().numpy().tobytes() for t in within.angles)
        within.prepared[name] = _found(*tables, within.angles[0].shape[1], size, rows)
    found: SlowPairs | None = within.prepared[name]
    return found


@lru_cache(maxsize=16)  # the tables of a cache are made anew with every block
@one_thread()
def _found(cos: bytes, sin: bytes, pairs: int, size: int, rows: int) -> SlowPairs | None:
    rotated, least = [], (1 - LEAST_GAIN) * size
    for table, still in ((cos, 1.0), (sin, 0.0)):
        angles = torch.frombuffer(bytearray(table), dtype=torch.float32).view(-1, pairs).double()
        rotated.append(torch.nn.functional.pad(angles, (0, size // 2 - pairs), value=still))
    places, best = len(rotated[0]), None
    for built in range(0, size, MULTIPLE):
        both = torch.cat([t[:, built // 2 :] for t in rotated], 1)
        waves = int((torch.linalg.svdvals(both) > TOLERANCE * places**0.5).sum())
        count = rows * waves
        # The rows of a block cost as many multiplications as this part of its tokens.
        making = count * (size - built) / places
        cost = built + -(-count // MULTIPLE) * MULTIPLE + making
        if cost < least:
            least, best = cost, (built, both, waves)
    if best is None:
        return None
    built, both, waves = best
    left, values, right = torch.linalg.svd(both, full_matrices=False)
    wave, factors = left[:, :waves].T.float(), (values[:, None] * right)[:waves].float()
    cosines, sines = (widened(t) for t in factors.tensor_split(2, 1))
    return SlowPairs(built, wave.contiguous(), cosines, sines)


def widened(of_pairs: Tensor) -> Tensor:
    """``[..., pairs]`` with zeros up to a multiple of `LANES`."""
    return torch.nn.functional.pad(of_pairs, (0, -of_pairs.shape[-1] % LANES)).contiguous()

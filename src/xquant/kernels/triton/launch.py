"""Launch: the arguments that every launch of one attention call shares."""

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...models.rope import Pair
from ..call import AttentionCall
from ..rope import RopeTable
from .support import power

if TYPE_CHECKING:
    from ...store.layer import CompressedLayer

MOST_ROWS = 64
"""Query heads times queries of one program."""
MOST_SUMS = 1 << 13
"""Of those times channels."""
WAVES = 2
"""Programs that are started for every multiprocessor."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; a few in the interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def blocks_per_split(columns: int, programs: int, device: torch.device) -> int:
    """How many of ``columns`` blocks a program reads, so that ``programs`` times the splits keep the device
    busy, with one more split left for what is kept exactly."""
    wanted = WAVES * multiprocessors(device) // programs - 1
    return max(-(-columns // max(wanted, 1)), 1)


class Launch(NamedTuple):
    """The newest tokens, and how many there are before them."""

    query: Tensor  # [B, H, t, D], channels beside each other, as in keys and values
    key: Tensor  # [B, G, t, D]
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float
    past: int  # tokens before the newest
    limit: int  # of them in blocks
    before: int  # of them in the tail
    start: Pair  # see `RopeAngles`
    within: Pair
    tail: Pair
    sinks: Pair

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.key.shape[1]

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def size(self) -> int:
        """Of a head."""
        return self.query.shape[3]

    @property
    def group_heads(self) -> int:
        """Query heads of a key/value head."""
        return self.query.shape[1] // self.groups

    @property
    def rows(self) -> int:
        """Query heads times queries of a key/value head."""
        return self.group_heads * self.queries

    @property
    def each(self) -> int:
        """Rows of a program."""
        return min(self.padded_rows, MOST_SUMS // power(self.size))

    @property
    def padded_rows(self) -> int:
        """The same of a program that keeps no sums."""
        return min(max(power(self.rows), 8), MOST_ROWS)

    def new_out(self) -> Tensor:
        """``[B, t, H, D]``, not written yet."""
        return torch.empty_like(self.query.transpose(1, 2), memory_format=torch.contiguous_format)

    @property
    def runs(self) -> int:
        """Programs for all rows."""
        return -(-self.rows // self.each)

    @property
    def mask_steps(self) -> list[int]:
        """Strides of sequences, queries and tokens; 0 where there is one for all."""
        if self.mask is None:
            return [0, 0, 0]
        found = zip(self.mask.stride(), self.mask.shape, strict=True)
        steps = [s if n > 1 else 0 for s, n in found]
        return [steps[0], *steps[2:]]

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        mask = self.mask
        return {
            "MASK": 0 if mask is None else 1 if mask.dtype == torch.bool else 2,
            "SOFTCAP": bool(self.softcap),
        }


def launch_of(layer: "CompressedLayer", call: AttentionCall, rope: RopeTable) -> Launch | None:
    """None where no kernel can answer."""
    query, key, value, mask, scaling, softcap = call
    if not call.masked_plainly:
        return None
    stream, device = layer.stream, layer.codec.view.device
    if layer.source is not None and layer.source.codec.view.device != device:
        return None
    past = layer.tokens - query.shape[2]
    limit = min(stream.tokens, past)
    before = past - limit  # older than these queries
    if layer.codec.rotated:
        nothing = torch.empty(0, device=device)
        pairs = [(nothing, nothing)] * 4
    else:
        columns = None if layer.sinks is None else layer.sinks.columns
        angles = rope.of(stream.lengths, stream.block, before, columns)
        if angles is None:
            return None
        given = angles.start, angles.within.angles, angles.tail, angles.sinks
        pairs = [(cos.to(device), sin.to(device)) for cos, sin in given]
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return Launch(query, key, value, mask, scaling, softcap or 0.0, past, limit, before, *pairs)

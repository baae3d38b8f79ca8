"""Attention over packed keys and values by Triton: one layer's side of the kernels."""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..angles import Pair
from ..newest import Newest
from .angles import TurnBook
from .attend import attend
from .describe import side
from .join import join
from .support import power

if TYPE_CHECKING:
    from ...layer import CompressedLayer

FIELDS = ("codes", "scale", "zero", "outlier_count", "outlier_excess", "outlier_channel")
"""In the order in which the kernel finds their addresses."""
MOST_ROWS = 64
"""Query heads times queries of one program."""
MOST_SUMS = 1 << 13
"""Of those times channels."""
WIDE = 1 << 14
"""Elements of a block and head from which on a program has twice as many warps."""
WAVES = 2
"""Programs that are started for every multiprocessor."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; a few in the interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class TritonAttention:
    """Attends over one layer. Holds addresses, so it is never copied with the cache."""

    def __init__(self, layer: "CompressedLayer", book: TurnBook) -> None:
        self._layer, self._book = layer, book
        self._version = -1
        view, block = layer.codec.view, layer.stream.block
        self._device = view.device
        self._sides = [
            side(segment, block, view.head_size, view.device) for segment in layer.codec.segments
        ]
        offset = getattr(layer.codec, "offset", None)
        self._offset = None if offset is None else offset.float().contiguous()
        keys, values = self._sides
        self._constants = {
            "D": view.head_size,
            "DP": power(view.head_size),
            "N": block,
            "NP": power(block),
            "TURN": not layer.codec.rotated,
            "OFFSET": offset is not None,
            **keys.constants("KEY"),
            **values.constants("VALUE"),
        }
        self._levels = [side.levels for side in self._sides]
        self._nothing = torch.zeros(1, device=view.device)  # in place of what a layer has not
        self._columns = 0
        self._blocks = torch.zeros(1, dtype=torch.int64, device=view.device)
        self._begins = self._lengths = torch.zeros(1, dtype=torch.int32, device=view.device)

    def _refresh(self) -> None:
        """Point to the blocks as they are now."""
        stream = self._layer.stream
        self._version = stream.version
        self._columns = len(stream.lengths)
        if stream.table is None:
            return
        fields = [self._fields(number) for number in range(2)]
        known = torch.stack([addresses for side in fields for addresses in side])
        # What a block is read by lies together for the columns of a sequence: [fields, B, columns].
        self._blocks = known.to(self._device, non_blocking=True)[:, stream.table]
        lengths = torch.tensor(stream.lengths, dtype=torch.int32)
        spans = torch.stack([lengths.cumsum(0, dtype=torch.int32) - lengths, lengths])
        self._begins, self._lengths = spans.to(self._device, non_blocking=True)

    def _fields(self, number: int) -> list[Tensor]:
        """Where each field of every block lies, int64 ``[N]``; 0 where there is none."""
        stream, side = self._layer.stream, self._sides[number]
        fields = dict(stream.pool[number])
        if stream.segments[number].borrows:
            assert stream.lender is not None
            fields["codes"] = stream.lender.pool[number]["codes"]
        found = {name: blocks.addresses for name, blocks in fields.items()}
        if side.fixed is not None:
            for name, given in zip(("scale", "zero"), side.fixed, strict=True):
                found[name] = torch.full((stream.blocks,), given.data_ptr())
        nowhere = torch.zeros(stream.blocks, dtype=torch.int64)
        return [found.get(name, nowhere) for name in FIELDS]

    def attend(self, newest: Newest) -> Tensor | None:
        """As `PackedAttention.attend`. Asks the device for nothing while no block is sealed."""
        layer, stream = self._layer, self._layer.stream
        query, key, value, mask, scaling, softcap = newest
        batch, heads, queries, size = query.shape
        if not newest.masked_plainly:
            return None
        if layer.lender is not None and layer.lender.codec.view.device != self._device:
            return None
        past = layer.get_seq_length() - queries
        limit = min(stream.tokens, past)
        before = past - limit  # of the tail, older than these queries
        turns = self._turns(stream.lengths, before, layer.sink_at)
        if turns is None:
            return None
        if stream.version != self._version:
            self._refresh()
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        groups = key.shape[1]
        rows = heads // groups * queries
        each = min(max(power(rows), 16), MOST_ROWS, MOST_SUMS // power(size))
        runs = -(-rows // each)
        # As many parts as keep the device busy: one has what is kept exactly, the others blocks.
        wanted = WAVES * multiprocessors(self._device) // (batch * groups * runs) - 1
        share = max(-(-self._columns // max(wanted, 1)), 1)
        parts = 1 + -(-self._columns // share)
        sums, peaks = self._book.room(self._device, batch * groups * parts * rows, size)
        tail = self._nothing if layer.tail is None else layer.tail
        sinks, sink_at, sink_count = self._nothing, self._begins, 0
        if layer.sinks is not None and layer.sink_at is not None:
            sinks, sink_at, sink_count = layer.sinks, layer.sink_at, layer.sinks.shape[1]
        out = torch.empty(batch, queries, heads, size, dtype=query.dtype, device=query.device)
        attend[(parts, batch * groups, runs)](
            query,
            key,
            value,
            tail,
            sinks,
            sink_at,
            self._nothing if mask is None else mask,
            sums,
            peaks,
            self._blocks,
            self._begins,
            self._lengths,
            *(angle for pair in turns for angle in pair),
            *(self._nothing if t is None else t for t in (*self._levels, self._offset)),
            self._columns,
            share,
            limit,
            past,
            before,
            sink_count,
            queries,
            heads // groups,
            groups,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *_steps(tail, 2),
            *_steps(sinks, 2),
            *_mask_steps(mask),
            scaling,
            softcap or 0.0,
            ROWS=each,
            SINKS=sink_count and power(sink_count),
            MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
            SOFTCAP=bool(softcap),
            num_warps=8 if self._constants["DP"] * self._constants["NP"] >= WIDE else 4,
            **self._constants,
        )
        join[(rows, batch * groups)](
            sums,
            peaks,
            out,
            parts,
            queries,
            heads // groups,
            groups,
            *out.stride()[:3],
            D=size,
            DP=self._constants["DP"],
        )
        return out

    def _turns(self, lengths: list[int], tail: int, sinks: Tensor | None) -> list[Pair] | None:
        """The angles that the kernel reads; None where it cannot."""
        if self._layer.codec.rotated:
            return [(self._nothing, self._nothing)] * 4
        found = self._book.of(lengths, self._layer.stream.block, tail, sinks)
        if found is None:
            return None
        pairs = found.start, found.turn, found.tail, found.sinks
        return [(cos.to(self._device), sin.to(self._device)) for cos, sin in pairs]


def _steps(rows: Tensor, axes: int) -> list[int]:
    """The first strides; 0 in place of those that are missing."""
    return [*rows.stride()[:axes], 0][:axes]


def _mask_steps(mask: Tensor | None) -> list[int]:
    """Strides of sequences, queries and tokens; 0 where there is one for all."""
    if mask is None:
        return [0, 0, 0]
    steps = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
    return [steps[0], *steps[2:]]

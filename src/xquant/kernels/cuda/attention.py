"""Attention over packed keys and values by CUDA: csrc/attend.cu, one launch for a layer.

It equals attention over `CompressedLayer.read` but for roundings to fp16. A cache and an engine's pages are
two ways to say where blocks are.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...past.angles import PagedAngles
from ...past.pages import PageLayout
from ...past.sequences import MOST_QUERIES, Sequences
from ...quant.operand import Operand
from ..addresses import page_addresses
from ..backend import Shared
from ..call import AttentionCall, mask_strides
from ..packed_call import GpuAttention, PackedCall, channels_together
from ..paged import PagedAttention
from ..splits import blocks_per_split
from ..workspace import Unshared, Workspace
from . import program, support
from .arguments import MASKS, Arguments, Heads

if TYPE_CHECKING:
    from ...past.growing_layer import CompressedLayer

ROWS = 4
"""Rows of a tile: query heads times queries of a key/value head."""
MOST_TILES = 2
"""Of a program."""


class PackedKernel:
    """How a layer's keys and values are packed, and the programs that read them."""

    def __init__(self, codec: LayerCodec, block: int) -> None:
        view = codec.view
        keys, values = (segment.operand(block) for segment in codec.segments)
        assert isinstance(keys, Operand) and isinstance(values, Operand)
        self.device, self.size, self.groups = view.device, view.head_size, view.kv_heads
        self.offset = None if codec.offset is None else codec.offset.float().contiguous()
        self._constants = (
            ("HEAD", view.head_size),
            ("BLOCK", block),
            ("KEY_BITS", keys.bits),
            ("VALUE_BITS", values.bits),
            ("KEY_PER_TOKEN", int(keys.per_token)),
            ("ROTATE", int(not codec.rotated)),
            ("STATE", support.DTYPES[view.dtype]),
        )
        self._ranges = {"key_group": keys.group, "value_group": values.group}
        self._arrived = torch.zeros(0, dtype=torch.int32, device=view.device)

    def arguments(self) -> Arguments:
        """With what all calls share."""
        made = Arguments()
        made.point_to(key_offset=self.offset)
        made.count(kv_heads=self.groups, **self._ranges)
        return made

    def reserve(self, counters: int) -> None:
        """Have so many counters of programs that are done. A CUDA graph that is recorded must not allocate
        them: they stay, and none of its memory may."""
        if len(self._arrived) < counters:
            self._arrived = self._arrived.new_zeros(counters)

    def launch(
        self,
        arguments: Arguments,
        batch: int,
        columns: int,
        queries: int,
        heads: int,
        workspace: Workspace,
    ) -> None:
        """Attend with ``queries`` new tokens of each sequence and ``heads`` query heads."""
        group = heads // self.groups
        rows, of_heads = queries * group, batch * self.groups
        tiles = min(-(-rows // ROWS), MOST_TILES)
        row_programs = -(-rows // (ROWS * tiles))
        paged = arguments.table is not None
        plain = not (arguments.mask_kind or arguments.softcap or arguments.sinks.data)
        kind = ("TILES", tiles), ("PAGED", int(paged)), ("PLAIN", int(plain))
        made = program.program(self.device, (*self._constants, *kind))
        each = blocks_per_split(columns, of_heads * row_programs, made.slots, beside=1)
        splits = 1 + -(-columns // each)
        written = splits * of_heads * rows
        sums, maxima = workspace.take(self.device, written * self.size, written * 2)
        self.reserve(of_heads * row_programs)
        arguments.point_to(sums=sums, maxima=maxima, arrived=self._arrived)
        arguments.count(queries=queries, group_heads=group)
        made.launch((splits, of_heads, row_programs), arguments)


class CudaAttention(GpuAttention):
    """Attends over one layer of a cache."""

    def __init__(self, layer: "CompressedLayer", shared: Shared) -> None:
        super().__init__(layer, shared, [None, None])
        self._packed = PackedKernel(layer.codec, layer.stream.block)
        self._arguments = self._packed.arguments()

    def _answer(self, packed: PackedCall, out: Tensor) -> None:
        table, layer, made = self._table, self._layer, self._arguments
        made.query, made.key, made.value = map(Heads.of, (packed.query, packed.key, packed.value))
        made.out = Heads.of(out.transpose(1, 2))
        made.point_to(mask=packed.mask, sink_logits=packed.sink_logits, **table.blocks._asdict())
        made.tail.point_to(layer.tail)
        made.tail.count = packed.before
        sinks = layer.sinks
        made.sinks.point_to(None if sinks is None else sinks.rows)
        made.sinks.columns = None if sinks is None else sinks.columns.data_ptr()
        made.sinks.count = 0 if sinks is None else sinks.columns.shape[1]
        if (angles := packed.angles) is not None:
            made.rotate_blocks((*angles.start, *angles.within))
            made.tail.rotate(angles.tail)
            made.sinks.rotate(angles.sinks)
        made.mask_batch, made.mask_query, made.mask_token = mask_strides(packed.mask)
        made.count(
            mask_kind=0 if packed.mask is None else MASKS[packed.mask.dtype],
            columns=table.columns,
            limit=packed.limit,
            past=packed.past,
        )
        made.scale(packed.scaling, packed.softcap)
        size = packed.query.shape[2], packed.query.shape[1]
        self._packed.launch(made, packed.batch, table.columns, *size, self._workspace)


class CudaPages(PagedAttention):
    """Attends over one layer in an engine's pages.

    Args:
        angles: needed where the codec keeps keys before RoPE.
    """

    def __init__(self, codec: LayerCodec, layout: PageLayout, angles: PagedAngles | None) -> None:
        self._layout, self._packed = layout, PackedKernel(codec, layout.block)
        self._most_rows = MOST_QUERIES * codec.view.query_heads
        self._arguments = self._packed.arguments()
        if not codec.rotated:
            assert angles is not None
            self._angles = angles.of_blocks(codec.view.device)
            self._arguments.rotate_blocks(self._angles)

    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        self._addresses = page_addresses(self._layout, pages, [None, None])
        self._rings, self._sinks = rings, sinks
        self._arguments.point_to(addresses=self._addresses)
        self._packed.reserve(len(rings) * self._most_rows)
        self._arguments.tail.point_to(rings)
        self._arguments.tail.capacity = rings.shape[1]

    def attend(self, call: AttentionCall, sequences: Sequences, out: Tensor) -> None:
        query, key, value = channels_together(*call[:3])
        assert out.stride(-1) == 1
        made, table = self._arguments, sequences.table
        made.query, made.key, made.value, made.out = map(Heads.of_rows, (query, key, value, out))
        logits = call.float_logits
        made.point_to(table=table, limits=sequences.limits, newest=sequences.new, sink_logits=logits)
        made.table_stride = table.stride(0)
        made.scale(call.scaling, call.softcap or 0.0)
        made.tail.runs = sequences.held.data_ptr()
        sinks = None if sequences.sinks is None else self._sinks
        made.sinks.point_to(sinks)
        made.sinks.runs = None if sequences.sinks is None else sequences.sinks.data_ptr()
        size = sequences.queries, query.shape[1]
        self._packed.launch(made, len(sequences.limits), table.shape[1], *size, Unshared())

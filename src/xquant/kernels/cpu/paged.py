"""Attention over an engine's pages by the native library: the functions of `attention` and `ranked`."""

import ctypes
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...models import AttentionView
from ...store.pages import PageLayout
from ..call import FLOATS
from ..paged import PagedAngles, PagedAttention, Sequences
from . import library as native
from .attention import describe_layer, rope_table, turned


def addresses_of(sequences: Sequences) -> dict[str, int]:
    """Where the numbers of sequences lie, found once for all layers."""
    if "cpu" not in sequences.prepared:
        batch, whole = len(sequences.limits), {"limits": (), "first": (), "held": (4,), "new": (4,)}
        if sequences.sinks is not None:
            whole |= {"sinks": (4,), "sink_places": (sequences.sink,)}
        table = sequences.table
        sequences.prepared["cpu"] = {
            name: native.address(getattr(sequences, name), torch.int32, batch, *sizes)
            for name, sizes in whole.items()
        } | {"table": native.address(table, torch.int32, batch, table.shape[1], rows=True)}
    found: dict[str, int] = sequences.prepared["cpu"]
    return found


class ExactRows:
    """Points a call to the tokens that are kept as they are: of rings, of a step and of sinks."""

    def __init__(self, call: native.Attend, view: AttentionView) -> None:
        self._call, self._value_at = call, view.kv_width
        self._heads, self._size = view.kv_heads, view.head_size
        self._held, self._new, self._sinks = call.exact
        for each in call.exact:
            each.head_stride = view.head_size
        self._new.causal = call.append = 1

    def bind(self, rings: Tensor, sinks: Tensor) -> None:
        for to, rows in ((self._held, rings), (self._sinks, sinks)):
            start = native.address(rows, FLOATS, *rows.shape, rows=True)
            to.key, to.value = start, start + self._value_at * rows.element_size()
            to.dtype = native.DTYPES[rows.dtype]
            to.batch_stride, to.token_stride, _ = rows.stride()
        self._held.capacity, self._dtype = rings.shape[1], rings.dtype

    def point(self, key: Tensor, value: Tensor, sequences: Sequences) -> list[Tensor]:
        """To the rows of these sequences. Returns what is pointed to."""
        if key.stride() != value.stride() or key.stride()[1:] != (key.shape[2], 1):
            key, value = key.contiguous(), value.contiguous()
        call, held, new, sinks = self._call, self._held, self._new, self._sinks
        at, shape = addresses_of(sequences), (len(key), self._heads, self._size)
        call.batch, call.queries = len(sequences.limits), sequences.queries
        call.limits = at["limits"]
        held.runs, held.count = at["held"], sequences.most_held
        new.runs, new.count = at["new"], sequences.queries
        new.key, new.value = (
            native.address(t, self._dtype, *shape, rows=True) for t in (key, value)
        )
        new.dtype = native.DTYPES[key.dtype]
        new.batch_stride = new.token_stride = key.stride(0)
        call.exact_count = 2
        if sequences.sinks is not None:
            sinks.runs, sinks.count = at["sinks"], sequences.sink
            sinks.column = at["sink_places"]
            call.exact_count = 3
        call.threads = torch.get_num_threads()
        return [key, value]


class LibraryPages(PagedAttention):
    """Attends over one layer by one call of the library.

    Args:
        call: of a layer; what depends on sequences is set here.
        sources: the fields of that call, or of others, that are pointed to the pages of these segments.
        scaling, softcap: of scores; softcap 0 for none.
    """

    def __init__(
        self,
        codec: LayerCodec,
        layout: PageLayout,
        call: native.Attend,
        sources: dict[int, Any],
        scaling: float,
        softcap: float,
    ) -> None:
        self._layout, self._call, self._sources = layout, call, sources
        self._turn, self._query_heads = codec.turns[0], codec.view.query_heads
        self._exact = ExactRows(call, codec.view)
        call.scaling, call.softcap = scaling, softcap
        call.query_head = call.out_head = codec.view.head_size

    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        addresses = self._layout.addresses(pages)
        self._addresses = [addresses[number] for number in self._sources]
        for to, fields in zip(self._sources.values(), self._addresses, strict=True):
            for name, blocks in fields.items():
                setattr(to, name, blocks.data_ptr())
        self._exact.bind(rings, sinks)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, out: Tensor
    ) -> None:
        heads = query.shape[2], 1  # strides of heads and channels
        if out.stride()[1:] != heads:
            raise ValueError("a kernel writes heads that follow each other")
        query = query if query.stride()[1:] == heads else query.contiguous()
        if self._turn is not None:
            query, turned_query = torch.stack(
                [query, turned(query[:, :, None], self._turn).squeeze(2)]
            )
            self._call.turned_query = turned_query.data_ptr()
        call, kept = self._call, self._exact.point(key, value, sequences)
        at, shape = addresses_of(sequences), (len(key), self._query_heads, query.shape[2])
        call.table, call.table_stride = at["table"], sequences.table.stride(0)
        call.query = native.address(query, FLOATS, *shape, rows=True)
        call.out = native.address(out, query.dtype, *shape, rows=True)
        call.dtype, call.query_batches = native.DTYPES[query.dtype], at["first"]
        call.query_batch = call.query_token = query.stride(0)
        call.out_batch = call.out_token = out.stride(0)
        self._run()
        del kept  # the library has read it

    @abstractmethod
    def _run(self) -> None:
        """Attend.

        Raises:
            MemoryError: the library has none.
        """


class NativePages(LibraryPages):
    """Attends over one layer of packed keys and values. ``angles`` are needed where the codec keeps keys
    before RoPE."""

    def __init__(
        self,
        codec: LayerCodec,
        layout: PageLayout,
        isa: str,
        scaling: float,
        softcap: float,
        angles: PagedAngles | None,
    ) -> None:
        library, call = native.library(), native.Attend()
        assert library is not None
        self._function = getattr(library, f"xq_attend_{isa}")
        self._constant = describe_layer(call, codec, layout.block)
        super().__init__(codec, layout, call, {0: call.key, 1: call.value}, scaling, softcap)
        if not codec.rotated:
            assert angles is not None
            table = rope_table(angles.within)
            self._constant += [table, *angles.starts]
            call.rope_table = table.data_ptr()
            call.start_cos, call.start_sin = (
                native.address(t, torch.float32, *t.shape) for t in angles.starts
            )

    def _run(self) -> None:
        if self._function(ctypes.byref(self._call)):
            raise MemoryError("not enough memory to attend over pages")

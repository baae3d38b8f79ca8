"""Attention over an engine's pages by any `Kernel` of the library."""

import torch
from torch import Tensor

from ...past.angles import PagedAngles
from ...past.pages import PageLayout
from ...past.sequences import Sequences
from ..call import FLOATS, AttentionCall
from ..paged import PagedAttention
from ..rope import BlockAngles
from . import library as native
from .attention import Kernel


def described(sequences: Sequences) -> dict[str, int]:
    """Where the numbers of sequences lie, and how many there are, found once for all layers."""
    if "cpu" not in sequences.prepared:
        batch, whole = len(sequences.limits), {"limits": (), "first": (), "held": (4,), "new": (4,)}
        if sequences.sinks is not None:
            whole |= {"sinks": (4,), "sink_places": (sequences.sink,)}
        table = sequences.table
        sequences.prepared["cpu"] = {
            name: native.address(getattr(sequences, name), torch.int32, batch, *sizes)
            for name, sizes in whole.items()
        } | {
            "table": native.address(table, torch.int32, batch, table.shape[1], rows=True),
            "table_stride": table.stride(0),
            "batch": batch,
            "queries": sequences.queries,
            "sink": sequences.sink,
        }
    found: dict[str, int] = sequences.prepared["cpu"]
    return found


class NativePages(PagedAttention):
    """Attends over one layer.

    Args:
        angles: needed where keys are kept before RoPE.
    """

    def __init__(self, kernel: Kernel, layout: PageLayout, angles: PagedAngles | None) -> None:
        self._kernel, self._layout = kernel, layout
        to = kernel.to
        self._query_heads = to.kv_heads * to.group_heads
        self._held, self._new, self._sinks = to.exact
        for each in to.exact:
            each.head_stride = to.head_size
        self._new.causal = to.append = 1
        self._form: tuple[object, ...] | None = None
        self._at: dict[str, int] = {}
        if angles is not None:
            cos, sin = (t[None] for t in angles.starts)
            kernel.set_angles(BlockAngles(angles.within, (cos, sin)))

    def bind(self, pages: Tensor, rings: Tensor, sinks: Tensor) -> None:
        self._addresses = self._layout.addresses(pages)
        self._kernel.point_to_blocks(self._addresses)
        width = self._kernel.to.kv_heads * self._kernel.to.head_size
        for to, rows in ((self._held, rings), (self._sinks, sinks)):
            start = native.address(rows, FLOATS, *rows.shape, rows=True)
            to.key, to.value = start, start + width * rows.itemsize
            to.dtype = native.DTYPES[rows.dtype]
            to.batch_stride, to.token_stride, _ = rows.stride()
        self._held.capacity = self._held.count = rings.shape[1]
        self._dtype = rings.dtype
        self._form = None

    def attend(self, call: AttentionCall, sequences: Sequences, out: Tensor) -> None:
        given, (query, key, value) = call, call[:3]
        if query.stride(2) != 1:
            query = query.contiguous()
            call = call._replace(query=query)
        if key.stride() != value.stride() or key.stride()[1:] != (key.shape[2], 1):
            key, value = key.contiguous(), value.contiguous()
            call = call._replace(key=key, value=value)
        form = call.form(out)
        if form != self._form:
            self._check(query, key, value, out)
            self._form = form
        self._point_to_sequences(sequences)
        self._new.key, self._new.value = key.data_ptr(), value.data_ptr()
        self._kernel.attend(call, out, sequences)
        copied = query is not given.query or key is not given.key
        self.repeats = self._kernel.repeats and not copied and call.sink_logits is None

    def repeat(self, call: AttentionCall, sequences: Sequences, out: Tensor) -> None:
        self._point_to_sequences(sequences)
        self._new.key, self._new.value = call.key.data_ptr(), call.value.data_ptr()
        self._kernel.repeat(call.query, out)

    def _point_to_sequences(self, sequences: Sequences) -> None:
        """What they read, but for their new states."""
        to, held, new, sinks = self._kernel.to, self._held, self._new, self._sinks
        to.threads = torch.get_num_threads()
        at = described(sequences)
        if at == self._at:
            return
        self._at = at
        to.batch, to.queries = at["batch"], at["queries"]
        to.limits, to.query_batches = at["limits"], at["first"]
        to.table, to.table_stride = at["table"], at["table_stride"]
        held.runs = at["held"]
        new.runs, new.count = at["new"], at["queries"]
        to.exact_count = 2
        if "sinks" in at:
            sinks.runs, sinks.count = at["sinks"], at["sink"]
            sinks.column, to.exact_count = at["sink_places"], 3

    def _check(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Whether a kernel can go through these, and how. Most steps ask for what the one before did."""
        to, new = self._kernel.to, self._new
        shape = key.shape[0], self._query_heads, to.head_size
        native.address(query, FLOATS, *shape, rows=True)
        native.address(out, query.dtype, *shape, rows=True)
        for states in (key, value):
            native.address(states, self._dtype, shape[0], to.kv_heads, to.head_size, rows=True)
        new.dtype = native.DTYPES[key.dtype]
        new.batch_stride = new.token_stride = key.stride(0)

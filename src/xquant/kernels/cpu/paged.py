"""Attention over an engine's pages by the native library: the same function as in `attention`."""

import ctypes

import torch
from torch import Tensor

from ...methods import LayerCodec
from ...store.pages import PageLayout
from ..paged import PagedAngles, PagedAttention, Sequences
from . import library as native
from .attention import describe_layer, rope_table


class NativePages(PagedAttention):
    """Attends over one layer of packed keys and values.

    Args:
        scaling, softcap: of scores; softcap 0 for none.
        angles: needed where the codec keeps keys before RoPE.
    """

    def __init__(
        self,
        codec: LayerCodec,
        layout: PageLayout,
        isa: str,
        scaling: float,
        softcap: float,
        angles: PagedAngles | None,
    ) -> None:
        library = native.library()
        assert library is not None
        self._function = getattr(library, f"xq_attend_{isa}")
        self._layout = layout
        self._call = call = native.Attend()
        self._constant = describe_layer(call, codec, layout.block)
        call.scaling, call.softcap = scaling, softcap
        if not codec.rotated:
            assert angles is not None
            table = rope_table(angles.within)
            self._constant += [table, *angles.starts]
            call.rope_table = table.data_ptr()
            call.start_cos, call.start_sin = (
                native.address(t, torch.float32, *t.shape) for t in angles.starts
            )
        self._value_at = codec.view.kv_width
        size = codec.view.head_size
        held, new = call.exact[0], call.exact[1]
        held.head_stride = new.head_stride = size
        new.causal = 1
        call.exact_count = 2
        call.query_head = call.out_head = size

    def bind(self, pages: Tensor, rings: Tensor) -> None:
        self._addresses = self._layout.addresses(pages)
        for to, fields in zip((self._call.key, self._call.value), self._addresses, strict=True):
            for name, blocks in fields.items():
                setattr(to, name, blocks.data_ptr())
        held = self._call.exact[0]
        held.key = rings.data_ptr()
        held.value = held.key + self._value_at * rings.element_size()
        held.dtype, held.capacity = native.DTYPES[rings.dtype], rings.shape[1]
        held.batch_stride, held.token_stride, _ = rings.stride()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, out: Tensor
    ) -> None:
        heads = query.shape[2], 1  # strides of heads and channels
        assert out.stride()[1:] == heads
        query = query if query.stride()[1:] == heads else query.contiguous()
        if key.stride() != value.stride() or key.stride()[1:] != heads:
            key, value = key.contiguous(), value.contiguous()
        call, dtype = self._call, native.DTYPES[query.dtype]
        call.batch, call.queries = len(sequences.limits), sequences.queries
        call.table, call.table_stride = sequences.table.data_ptr(), sequences.table.stride(0)
        call.limits = sequences.limits.data_ptr()
        call.query, call.out, call.dtype = query.data_ptr(), out.data_ptr(), dtype
        call.query_batches = sequences.first.data_ptr()
        call.query_batch = call.query_token = query.stride(0)
        call.out_batch = call.out_token = out.stride(0)
        held, new = call.exact[0], call.exact[1]
        held.runs, held.count = sequences.held.data_ptr(), sequences.most_held
        new.runs, new.count = sequences.new.data_ptr(), sequences.queries
        new.key, new.value, new.dtype = key.data_ptr(), value.data_ptr(), dtype
        new.batch_stride = new.token_stride = key.stride(0)
        call.threads = torch.get_num_threads()
        if self._function(ctypes.byref(call)):
            raise MemoryError("not enough memory to attend over pages")

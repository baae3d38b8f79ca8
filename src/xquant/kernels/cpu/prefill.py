"""Attention over states as they are, as when a prompt is read: csrc/prefill.h."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...past.exact import Scoring, States
from ..call import FLOATS
from . import library as native


class NativePrefill:
    """`ExactAttention` by the library. What a token gets depends on no other new token, and not on how a
    prompt is cut."""

    def __init__(self, isa: str) -> None:
        self._run = native.function("prefill", isa)

    def __call__(
        self, query: Tensor, states: Sequence[States], counts: Sequence[int], scoring: Scoring
    ) -> Tensor:
        query, new = _rows(query), len(query)
        states = [(_rows(keys), _rows(values)) for keys, values in states]
        _, kv_heads, size = states[0][0].shape
        heads, out = query.shape[1], torch.empty(query.shape, dtype=query.dtype, device="cpu")
        to = native.Prefill()
        to.query, to.out = native.address(query, FLOATS, new, heads, size, rows=True), out.data_ptr()
        (to.query_token, to.query_head), (to.out_token, to.out_head) = query.stride()[:2], out.stride()[:2]
        chunks = (native.Chunk * len(states))()
        to.chunks, to.count, first = ctypes.addressof(chunks), len(states), 0
        for chunk, (keys, values), count in zip(chunks, states, counts, strict=True):
            shape = len(keys), kv_heads, size
            chunk.key = native.address(keys, query.dtype, *shape, rows=True)
            chunk.value = native.address(values, query.dtype, *shape, rows=True)
            chunk.key_token, chunk.key_head = keys.stride()[:2]
            chunk.value_token, chunk.value_head = values.stride()[:2]
            chunk.tokens, chunk.queries, chunk.first = len(keys), count, first
            first += count
        to.kv_heads, to.group_heads, to.head_size = kv_heads, heads // kv_heads, size
        to.dtype, to.threads = native.DTYPES[query.dtype], torch.get_num_threads()
        to.scaling, to.softcap = scoring.scaling, scoring.softcap
        if (logits := scoring.sink_logits) is not None:
            logits = logits.float().contiguous()
            to.sink_logits = native.address(logits, torch.float32, heads)
        self._run(to)
        return out


def _rows(states: Tensor) -> Tensor:
    """``[T, heads, D]`` without gaps in a row."""
    return states if states.stride(-1) == 1 else states.contiguous()

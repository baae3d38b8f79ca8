"""What an attention call asks of a layer with packed blocks, as kernels on a GPU take it."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..models.rotation import Pair
from .call import AttentionCall
from .rope import RopeTable

if TYPE_CHECKING:
    from ..store.layer import CompressedLayer


class PackedCall(NamedTuple):
    """The newest tokens, and how many there are before them."""

    query: Tensor
    """``[B, H, t, D]``, the channels of a head beside each other, as in keys and values."""
    key: Tensor
    """``[B, G, t, D]``, as the values."""
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float
    sink_logits: Tensor | None  # fp32 [H]
    past: int
    """Tokens before the newest."""
    limit: int
    """Of them, those in blocks."""
    before: int
    """Of them, those in the tail."""
    start: Pair
    """The rotations of `RopeAngles`; empty where keys are kept after RoPE."""
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
    def size(self) -> int:
        """Channels of a head."""
        return self.query.shape[3]

    @property
    def rows(self) -> int:
        """Query heads times queries of a key/value head."""
        return self.query.shape[1] * self.query.shape[2] // self.groups

    def new_out(self) -> Tensor:
        """``[B, t, H, D]``, not written yet."""
        return torch.empty_like(self.query.transpose(1, 2), memory_format=torch.contiguous_format)

    @property
    def mask_strides(self) -> tuple[int, int, int]:
        """Of sequences, queries and tokens; 0 where there is one for all."""
        if self.mask is None:
            return 0, 0, 0
        sizes = zip(self.mask.stride(), self.mask.shape, strict=True)
        batch, _, query, token = (stride if size > 1 else 0 for stride, size in sizes)
        return batch, query, token


def packed_call(
    layer: "CompressedLayer", call: AttentionCall, rope: RopeTable
) -> PackedCall | None:
    """``call`` over a layer and its past; None where no kernel can answer it."""
    fitted = call.fitted(layer)
    if fitted is None:
        return None
    query, key, value, mask, scaling, softcap, sink_logits = fitted
    stream, device = layer.stream, layer.codec.view.device
    if layer.source is not None and layer.source.codec.view.device != device:
        return None
    past = layer.tokens - query.shape[2]
    limit = min(stream.tokens, past)
    before = past - limit
    if layer.codec.rotated:
        nothing = torch.empty(0, device=device, dtype=torch.float32)
        pairs = [(nothing, nothing)] * 4
    else:
        columns = None if layer.sinks is None else layer.sinks.columns
        angles = rope.of(stream.lengths, stream.block, before, columns)
        if angles is None:
            return None
        rotations = angles.start, angles.within.angles, angles.tail, angles.sinks
        pairs = [(cos.to(device), sin.to(device)) for cos, sin in rotations]
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    cap = softcap or 0.0
    return PackedCall(
        query, key, value, mask, scaling, cap, sink_logits, past, limit, before, *pairs
    )

"""What an attention call asks of a layer with packed blocks, as kernels on a GPU take it and answer it."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..models.rotation import Pair
from .addresses import BlockTable, Offline
from .backend import LayerAttention, Shared
from .call import AttentionCall
from .rope import RopeTable

if TYPE_CHECKING:
    from ..past.growing_layer import CompressedLayer


class Angles(NamedTuple):
    """The rotations of `RopeAngles`, where the layer is."""

    start: Pair
    within: Pair
    tail: Pair
    sinks: Pair


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
    angles: Angles | None
    """None where keys are kept after RoPE."""

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    def new_out(self) -> Tensor:
        """``[B, t, H, D]``, not written yet."""
        return torch.empty_like(self.query.transpose(1, 2), memory_format=torch.contiguous_format)


class GpuAttention(LayerAttention):
    """Attends over one layer of a cache that grows, by kernels on a GPU.

    Args:
        offline: as of `BlockTable`.
    """

    def __init__(self, layer: "CompressedLayer", shared: Shared, offline: Sequence[Offline]) -> None:
        self._layer, self._rope, self._workspace = layer, shared.rope, shared.workspace
        self._table = BlockTable(layer.stream, offline, layer.codec.view.device)

    def attend(self, call: AttentionCall) -> Tensor | None:
        """See `LayerAttention.attend`. Asks the device for nothing while no block is sealed."""
        packed = packed_call(self._layer, call, self._rope)
        if packed is None:
            return None
        self._table.refresh()
        out = packed.new_out()
        self._answer(packed, out)
        return out

    @abstractmethod
    def _answer(self, packed: PackedCall, out: Tensor) -> None:
        """Write the output ``[B, t, H, D]``; the table of blocks is as they are now."""


def packed_call(layer: "CompressedLayer", call: AttentionCall, rope: RopeTable) -> PackedCall | None:
    """``call`` over a layer and its past; None where no kernel can answer it."""
    fitted = call.fitted(layer)
    if fitted is None:
        return None
    query, key, value, mask, scaling, softcap, _ = fitted
    stream, device = layer.stream, layer.codec.view.device
    if layer.source is not None and layer.source.codec.view.device != device:
        return None
    past = layer.tokens - query.shape[2]
    limit = min(stream.tokens, past)
    before = past - limit
    angles = None
    if not layer.codec.rotated:
        found = rope.of(layer, before)
        if found is None:
            return None
        rotations = found.start, found.within.angles, found.tail, found.sinks
        angles = Angles(*((cos.to(device), sin.to(device)) for cos, sin in rotations))
    query, key, value = channels_together(query, key, value)
    scores = mask, scaling, softcap or 0.0, fitted.float_logits
    return PackedCall(query, key, value, *scores, past, limit, before, angles)


def channels_together(*states: Tensor) -> tuple[Tensor, ...]:
    """States whose channels lie beside each other: copies of those that do not."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in states)

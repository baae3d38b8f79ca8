"""Sealing: the blocks that tails hold become codes, of several layers in one go."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..quant import Packed
from .stream import pack_all

if TYPE_CHECKING:
    from .layer import CompressedLayer


def seal(layers: "Sequence[CompressedLayer]") -> None:
    """Seal what is due in ``layers``, which are whole spans.

    Raises:
        ValueError: NaN in what is packed; nothing was sealed.
    """
    # A forward pass that failed may have left some layers a block ahead.
    together = defaultdict(list)
    for layer in layers:
        together[layer.stream.tokens, layer.due].append(layer)
    packed: dict[CompressedLayer, list[Packed]] = {}
    for (start, blocks), some in together.items():
        rows = [_oldest(layer, blocks) for layer in some]
        packed.update(zip(some, pack(some, rows, start), strict=True))
    for layer in layers:
        if layer is layer.span[0]:
            merged = layer.codec.merge([packed[one] for one in layer.span])
            for one, fields in zip(layer.span, merged, strict=True):
                _settle(one, fields)


def pack(
    layers: "Sequence[CompressedLayer]", rows: Sequence[Tensor], start: int
) -> list[list[Packed]]:
    """Blocks from token ``start`` on, packed but not sealed.

    Args:
        rows: their features in each layer, ``[B, m, n, W]``.
    """
    shape = rows[0].shape[1:3]
    excluded = layers[0].index.excluded(start, start + shape.numel())
    if excluded is not None:
        excluded = excluded.unflatten(1, shape).flatten(0, 1)
    encoded = (layer.encode(own, start) for layer, own in zip(layers, rows, strict=True))
    return pack_all([layer.stream for layer in layers], encoded, excluded)


def _oldest(layer: "CompressedLayer", blocks: int) -> Tensor:
    """The first ``blocks`` of the tail, ``[B, m, n, W]``."""
    assert layer.tail is not None
    size = layer.stream.block
    return layer.tail[:, : blocks * size].unflatten(1, (blocks, size))


def _settle(layer: "CompressedLayer", packed: list[Packed]) -> None:
    """Keep ``packed`` in place of the blocks of the tail that are due."""
    assert layer.tail is not None
    start, count = layer.stream.tokens, layer.due * layer.stream.block
    if layer.index.excluded(start, start + count) is not None:
        _keep_sinks(layer, layer.tail[:, :count], start)
    layer.stream.seal(packed, layer.tail.shape[0])
    layer.tail = layer.tail[:, count:].clone()


def _keep_sinks(layer: "CompressedLayer", rows: Tensor, start: int) -> None:
    """Keep the sinks among the features ``[B, t, W]`` of the tokens from ``start`` on as they are."""
    if layer.index.sinks == 0:
        return
    if layer.sinks is None or layer.sink_at is None:
        shape = (rows.shape[0], layer.index.sinks)
        layer.sinks = rows.new_zeros(*shape, rows.shape[2])
        layer.sink_at = torch.full(shape, -1, dtype=torch.int32, device=rows.device)
    sink = layer.index.sink.to(rows.device)
    rank = sink.cumsum(1) - 1
    sequence, column = sink[:, start : start + rows.shape[1]].nonzero(as_tuple=True)
    slot = rank[sequence, column + start]
    # Copies: where the forward pass fails, the layer goes back to those before.
    layer.sinks = layer.sinks.index_put((sequence, slot), rows[sequence, column])
    layer.sink_at = layer.sink_at.index_put((sequence, slot), (column + start).int())

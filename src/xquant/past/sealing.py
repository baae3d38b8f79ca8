"""Sealing: the blocks that are due in several layers are packed in one go, and each layer keeps its own."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..quant import Packed
from ..quant.quantizer import dense
from .stream import Stream

if TYPE_CHECKING:
    from .growing import GrowingPast


def seal(layers: "Sequence[GrowingPast]") -> None:
    """Seal what is due in ``layers``, which are whole spans.

    Raises:
        ValueError: NaN in what is packed; nothing was sealed.
    """
    # A forward pass that failed may have left some layers a block ahead.
    together = defaultdict(list)
    for layer in layers:
        together[layer.stream.tokens, layer.due].append(layer)
    packed: dict[GrowingPast, list[Packed]] = {}
    for (start, blocks), some in together.items():
        rows = [layer.oldest(blocks) for layer in some]
        packed.update(zip(some, pack(some, rows, start), strict=True))
    for layer in layers:
        if layer is layer.span[0]:
            merged = layer.codec.merge([packed[one] for one in layer.span])
            for one, fields in zip(layer.span, merged, strict=True):
                one.settle(fields)


def pack(layers: "Sequence[GrowingPast]", rows: Sequence[Tensor], start: int) -> list[list[Packed]]:
    """Blocks from token ``start`` on as the segments of each layer store them, not sealed yet.

    Args:
        rows: their features in each layer, ``[B, m, n, W]``.

    Raises:
        ValueError: NaN in a token that sets a range.
    """
    shape = rows[0].shape[1:3]
    excluded = layers[0].index.excluded(start, start + shape.numel())
    if excluded is not None:
        excluded = excluded.unflatten(1, shape).flatten(0, 1)
    return pack_rows([layer.stream for layer in layers], _encoded(layers, rows, start), excluded)


def _encoded(layers: "Sequence[GrowingPast]", rows: Sequence[Tensor], start: int) -> Iterator[Tensor]:
    """What each layer packs, ``[N, n, C]``, of its features ``[B, m, n, W]``."""
    of_span: list[Tensor] = []
    for layer, own in zip(layers, rows, strict=True):
        encoded = layer.encode(own, start)
        if not layer.codec.coded_together:
            yield encoded
            continue
        of_span.append(encoded)
        if layer is layer.span[-1]:
            yield from layer.codec.combine(of_span)
            of_span = []


def pack_rows(
    streams: Sequence[Stream], rows: Iterable[Tensor], excluded: Tensor | None
) -> list[list[Packed]]:
    """Blocks as the segments of each stream store them; where the packer asks for it, segments of one kind in
    one call.

    Segments that share codes are packed with codes of their own: `LayerCodec.merge` wants to see them, and
    `Stream.seal` wants to be given none.

    Args:
        rows: ``[N, n, C]`` of each stream.
        excluded: bool ``[N, n]``, the same for all; see `quant`.

    Raises:
        ValueError: NaN in a token that sets a range.
    """
    packed: list[list[Packed]] = [[{} for _ in stream.segments] for stream in streams]
    alike = defaultdict(list)
    for stream, own, fields in zip(streams, rows, packed, strict=True):
        hidden = None if excluded is None else excluded.to(own.device)
        if any(segment.predictor is not None for segment in stream.segments):
            in_turn = stream.packer.pack_segments(stream.segments, own, hidden)
            for to, found in zip(fields, in_turn, strict=True):
                to.update(found)
            continue
        parts = own.split([s.channels for s in stream.segments], dim=-1)
        for segment, x, to in zip(stream.segments, parts, fields, strict=True):
            if stream.packer.joins(segment.quantizer, x):
                kind = segment.quantizer, x.shape, x.dtype, x.device, stream.packer
                alike[kind].append((x, to))
            else:
                to.update(stream.packer.pack(segment.quantizer, x, hidden))
    for (quantizer, shape, _, device, packer), pairs in alike.items():
        xs, into = zip(*pairs, strict=True)
        hidden = None if excluded is None else excluded.to(device).repeat(len(xs), 1)
        joined = packer.pack(quantizer, torch.cat(xs), hidden)
        for name in joined:
            for to, field in zip(into, dense(joined, name).split(shape[0]), strict=True):
                to[name] = field
    return packed

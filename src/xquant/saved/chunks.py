"""Chunks: the packed blocks of some tokens of one sequence, in all layers, as a few flat tensors.

A chunk is as small as what it holds: the method says the shape and type of every field, so they lie after
each other without names.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..contents.contents import Contents
from ..past.growing_layer import CompressedLayer
from ..past.sinks import Sinks
from ..past.slabs import Slabs
from ..past.stream import Pool
from ..quant import Ragged, Segment
from . import bases
from .reading import FLOATS

_OTHER = "it holds more or less than the method stores"

Chunk = dict[str, Tensor]
"""``packed`` uint8 ``[.]``: the fields of all blocks, by layer, segment and field. ``sinks`` ``[.]``: the
features of the sinks among the tokens, by layer. ``features`` ``[0]``: of the type that features have.
``bases`` ``[.]``: see `bases_of`."""


def whole_chunks(contents: Contents, blocks: int) -> int:
    """How many chunks of so many ``blocks`` a sequence has: those in which no block was cut short."""
    first = contents.compressed[0].stream
    whole = 0
    for length in first.lengths:
        if length < first.block:
            break
        whole += 1
    return whole // blocks


def chunk_of(contents: Contents, sequence: int, number: int, blocks: int, bases_held: Tensor) -> Chunk:
    """The chunk of this number of a sequence; ``bases_held`` as by `bases_of`."""
    packed, sinks = [], []
    start = number * blocks * contents.method.group
    ranks = slice(start, start + blocks * contents.method.group)
    for layer in contents.compressed:
        stream = layer.stream
        assert stream.table is not None and layer.tail is not None
        ids = stream.table[sequence, number * blocks : (number + 1) * blocks]
        for segment, fields in zip(stream.segments, stream.pool, strict=True):
            for name in segment.fields(stream.block):
                packed.append(_bytes(_dense(fields, name).read(ids)))
            for name in segment.quantizer.ragged:
                flat = _ragged(fields, name)[ids].flat()
                packed += [_bytes(torch.tensor([len(flat)], device="cpu")), _bytes(flat)]
        none = layer.tail.new_empty(0, dtype=layer.codec.sink_dtype)
        rows = none if layer.sinks is None else layer.sinks.rows[sequence, ranks]
        sinks.append(rows.flatten().cpu())
    tail = contents.compressed[0].tail
    assert tail is not None
    return {
        "packed": torch.cat(packed),
        "sinks": torch.cat(sinks),
        "features": torch.empty(0, dtype=tail.dtype, device="cpu"),
        "bases": bases_held,
    }


def bases_of(contents: Contents) -> Tensor:
    """A few numbers ``[.]`` of the bases that the codecs computed from the weights, see `bases`."""
    found = bases.probe(contents.method, contents.codecs)
    return torch.tensor([number for own in found for number in own], dtype=torch.float64, device="cpu")


def fill(contents: Contents, chunks: Sequence[Chunk], blocks: int, long: bool, ids: Tensor) -> None:
    """Give an empty cache the tokens of these chunks, each of so many ``blocks``.

    Args:
        ids: of the tokens, ``[T]``, and perhaps of some that follow.
        long: whether they have the frequencies of long inputs, of a model with two sets (`models.rope`).

    Raises:
        DamagedChunkError: one of them is none of this method and model.
    """
    count = len(chunks) * blocks
    tokens = count * contents.method.group
    home = contents.compressed[0].codec.view.device
    positions = torch.arange(tokens, device=home)[None]
    spans = ((tokens, long),) if contents.attachment.view.rope.switches else ()
    real = torch.ones_like(positions, dtype=torch.bool)
    contents.index.give(positions, real, spans, ids[None, :tokens])
    readers = [_Reader(number, chunk) for number, chunk in enumerate(chunks)]
    expected = bases_of(contents)
    for reader in readers:
        reader.check(reader.dtype == readers[0].dtype, "its features are of another type")
        reader.check_bases(expected)
    for layer in contents.compressed:
        _fill_layer(layer, readers, blocks, count)
    for reader in readers:
        reader.check_all_read()


class DamagedChunkError(ValueError):
    """A chunk that is not what the method and the model make of tokens.

    Args:
        number: which of those that were given.
    """

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class _Reader:
    """What lies in a chunk, taken from its beginning on."""

    def __init__(self, number: int, chunk: Chunk) -> None:
        self._number = number
        self.check(chunk.keys() == {"packed", "sinks", "features", "bases"}, "it holds other tensors")
        self._packed, self._sinks = chunk["packed"].flatten(), chunk["sinks"].flatten()
        self._bases, self.dtype = chunk["bases"].flatten(), chunk["features"].dtype
        self.check(self._packed.dtype == torch.uint8, "its fields are no bytes")
        self.check(self.dtype in FLOATS, "its features are of no known type")

    def check(self, right: bool, why: str) -> None:
        if not right:
            raise DamagedChunkError(self._number, why)

    def check_bases(self, expected: Tensor) -> None:
        same = bases.same([self._bases.tolist()], [expected.tolist()])
        self.check(same, "it was packed in other bases")

    def take(self, dtype: torch.dtype, count: int) -> Tensor:
        """The next ``count`` elements of the packed fields."""
        size = count * dtype.itemsize
        self.check(0 <= size <= len(self._packed), _OTHER)
        taken, self._packed = self._packed[:size], self._packed[size:]
        return taken.clone().view(dtype)

    def take_run(self, dtype: torch.dtype) -> Tensor:
        """The same, as many as are said to follow."""
        return self.take(dtype, int(self.take(torch.int64, 1)))

    def take_sinks(self, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """The next ``count`` sinks, ``[1, count, width]``."""
        self.check(count * width <= len(self._sinks) and self._sinks.dtype == dtype, _OTHER)
        taken, self._sinks = self._sinks[: count * width], self._sinks[count * width :]
        return taken.view(1, count, width)

    def check_all_read(self) -> None:
        self.check(not len(self._packed) and not len(self._sinks), _OTHER)

    def cut(self, segment: Segment, fields: dict[str, Tensor], flat: dict[str, Tensor]) -> dict[str, Ragged]:
        """`Quantizer.cut` of the fields of this chunk."""
        try:
            return segment.quantizer.cut(fields, flat, segment.channels)
        except ValueError as error:
            raise DamagedChunkError(self._number, str(error)) from None


def _fill_layer(layer: CompressedLayer, readers: Sequence[_Reader], blocks: int, count: int) -> None:
    device, block = layer.codec.view.device, layer.stream.block
    pool = [_segment(segment, readers, blocks, block, device) for segment in layer.stream.segments]
    per_chunk, total, dtype = blocks * block, layer.index.sinks, readers[0].dtype
    of_sinks = layer.codec.sink_dtype or dtype
    counts = [max(min(total - i * per_chunk, per_chunk), 0) for i in range(len(readers))]
    rows = [
        reader.take_sinks(own, layer.codec.width, of_sinks)
        for reader, own in zip(readers, counts, strict=True)
    ]
    sinks = torch.cat(rows, 1).to(device)
    kept = None
    if total:
        sinks = torch.nn.functional.pad(sinks, (0, 0, 0, total - sinks.shape[1]))
        kept = Sinks.standing(sinks, layer.index.sink, count * block)
    tail = torch.empty(1, 0, layer.codec.width, dtype=dtype, device=device)
    table = torch.arange(count, device=device)[None]
    layer.restore((tail, None, kept, (pool, table, [block] * count, count * block, count)))


def _segment(
    segment: Segment, readers: Sequence[_Reader], blocks: int, block: int, device: torch.device
) -> Pool:
    """The fields of a segment, of all blocks."""
    dense: dict[str, list[Tensor]] = defaultdict(list)
    ragged: dict[str, list[Ragged]] = defaultdict(list)
    for reader in readers:
        held: dict[str, Tensor] = {}
        for name, field in segment.fields(block).items():
            taken = reader.take(field.dtype, blocks * field.nbytes // field.dtype.itemsize)
            held[name] = taken.view(blocks, *field.shape).to(device)
            dense[name].append(held[name])
        flat = {n: reader.take_run(d).to(device) for n, d in segment.quantizer.ragged.items()}
        for name, part in (reader.cut(segment, held, flat) if flat else {}).items():
            ragged[name].append(part)
    found: Pool = {name: Slabs(torch.cat(parts)) for name, parts in dense.items()}
    return found | {name: Ragged(b for part in each for b in part.blocks) for name, each in ragged.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def _dense(fields: Pool, name: str) -> Slabs:
    found = fields[name]
    assert isinstance(found, Slabs)
    return found


def _ragged(fields: Pool, name: str) -> Ragged:
    found = fields[name]
    assert isinstance(found, Ragged)
    return found

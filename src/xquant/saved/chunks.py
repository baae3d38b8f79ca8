"""Chunks: the packed blocks of some tokens of one sequence, in all layers, as a few flat tensors.

A chunk is as small as what it holds: the method says the shape and type of every field, so they lie after
each other without names. After the chunks of a sequence there may be a checkpoint: it has the blocks and the
tail that are in no chunk, and what layers that are not compressed held after the last token.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..contents import others
from ..contents.contents import Contents
from ..contents.others import FLOATS
from ..past.growing_layer import CompressedLayer
from ..past.sinks import Sinks
from ..past.slabs import Slabs
from ..past.stream import Pool
from ..quant import Ragged, Segment, states
from . import bases

_FIELDS = {"packed", "sinks", "features", "bases"}
_OTHER = "it holds more or less than the method stores"

Chunk = dict[str, Tensor]
"""``packed`` uint8 ``[.]``: the fields of all blocks, by layer, segment and field. ``sinks`` ``[.]``: the
features of the sinks among the tokens, by layer. ``features`` ``[0]``: of the type that features have.
``bases`` ``[.]``: see `bases_of`. A checkpoint also has ``ends`` int64: tokens held, chunks before it, and
the lengths of its blocks; ``tail`` ``[.]``: the features of the tail, by layer; and what `contents.others`
names.
"""


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
    return _packed(contents, sequence, range(number * blocks, (number + 1) * blocks), bases_held)


def checkpoint_of(contents: Contents, sequence: int, blocks: int, bases_held: Tensor, bits: int) -> Chunk:
    """What a sequence, which has no padding, holds beside its whole chunks.

    Args:
        blocks: of a chunk.
        bits: of numbers of layers that are not compressed, see `states.coded`.
    """
    lengths, whole = contents.compressed[0].stream.lengths, whole_chunks(contents, blocks)
    found = _packed(contents, sequence, range(whole * blocks, len(lengths)), bases_held)
    ends = [contents.index.length, whole, *lengths[whole * blocks :]]
    tails = [layer.tail[sequence].flatten().cpu() for layer in contents.compressed if layer.tail is not None]
    found |= {"ends": torch.tensor(ends, device="cpu"), "tail": torch.cat(tails)}
    return found | states.coded(others.held_alone(contents, sequence), bits)


def _packed(contents: Contents, sequence: int, blocks: range, bases_held: Tensor) -> Chunk:
    """Some blocks of a sequence."""
    packed, sinks = [torch.empty(0, dtype=torch.uint8, device="cpu")], []
    lengths = contents.compressed[0].stream.lengths
    ranks = slice(sum(lengths[: blocks.start]), sum(lengths[: blocks.stop]))
    for layer in contents.compressed:
        stream = layer.stream
        assert layer.tail is not None
        if blocks:
            assert stream.table is not None
            ids = stream.table[sequence, blocks.start : blocks.stop]
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
        chunks: the last may be a checkpoint.
        ids: of the tokens, ``[T]``, and perhaps of some that follow.
        long: whether they have the frequencies of long inputs, of a model with two sets (`models.rope`).

    Raises:
        DamagedChunkError: one of them is none of this method and model.
    """
    readers = [_Reader(number, chunk, blocks, contents) for number, chunk in enumerate(chunks)]
    expected, last = bases_of(contents), readers[-1]
    for reader in readers:
        reader.check(reader.dtype == readers[0].dtype, "its features are of another type")
        reader.check_bases(expected)
        reader.check(reader is last or reader.ends is None, "a chunk is wanted, not a checkpoint")
    sealed = tokens = sum(reader.tokens for reader in readers)
    if last.ends is not None:
        tokens, before = last.ends
        fits = before == len(chunks) - 1 and sealed <= tokens <= len(ids)
        last.check(fits, "it is of another number of tokens")
    home = contents.compressed[0].codec.view.device
    positions = torch.arange(tokens, device=home)[None]
    spans = ((tokens, long),) if contents.attachment.view.rope.switches else ()
    real = torch.ones_like(positions, dtype=torch.bool)
    contents.index.give(positions, real, spans, ids[None, :tokens])
    for layer in contents.compressed:
        _fill_layer(layer, readers, tokens - sealed)
    others.fill(contents, last.others, 1, tokens)
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

    def __init__(self, number: int, chunk: Chunk, blocks: int, contents: Contents) -> None:
        self._number = number
        self.check(chunk.keys() >= _FIELDS, "it lacks tensors")
        self._packed, self._sinks = chunk["packed"].flatten(), chunk["sinks"].flatten()
        self._bases, self.dtype = chunk["bases"].flatten(), chunk["features"].dtype
        self.check(self._packed.dtype == torch.uint8, "its fields are no bytes")
        self.check(self.dtype in FLOATS, "its features are of no known type")
        rest = {name: tensor for name, tensor in chunk.items() if name not in _FIELDS}
        none = torch.empty(0, dtype=self.dtype, device="cpu")
        self._tail = rest.pop("tail", none).flatten()
        ends = rest.pop("ends", None)
        self.ends: tuple[int, int] | None = None
        """Of a checkpoint: tokens that are held, and chunks before it."""
        self.lengths = [contents.method.group] * blocks
        """Of its blocks."""
        if ends is not None:
            right = ends.dtype == torch.int64 and ends.dim() == 1 and len(ends) >= 2
            self.check(right and self._tail.dtype == self.dtype, _OTHER)
            held, before, *self.lengths = ends.tolist()
            self.ends = held, before
            self.check(all(0 < length <= contents.method.group for length in self.lengths), _OTHER)
        try:
            self.others = others.Tensors(states.decoded(rest), partial(DamagedChunkError, number))
        except ValueError as error:
            raise DamagedChunkError(number, str(error)) from None
        """What layers hold that are not compressed."""

    @property
    def tokens(self) -> int:
        """Of its blocks."""
        return sum(self.lengths)

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

    def take_tail(self, count: int, width: int) -> Tensor:
        """The next ``count`` rows of the tail, ``[1, count, width]``."""
        self.check(count * width <= len(self._tail), _OTHER)
        taken, self._tail = self._tail[: count * width], self._tail[count * width :]
        self.check(bool(taken.isfinite().all()), "its tail holds NaN or infinity")
        return taken.clone().view(1, count, width)

    def check_all_read(self) -> None:
        self.check(not len(self._packed) and not len(self._sinks) and not len(self._tail), _OTHER)
        self.others.check_all_read()

    def cut(self, segment: Segment, fields: dict[str, Tensor], flat: dict[str, Tensor]) -> dict[str, Ragged]:
        """`Quantizer.cut` of the fields of this chunk."""
        try:
            return segment.quantizer.cut(fields, flat, segment.channels)
        except ValueError as error:
            raise DamagedChunkError(self._number, str(error)) from None


def _fill_layer(layer: CompressedLayer, readers: Sequence[_Reader], newest: int) -> None:
    """Give a layer the blocks of these chunks, and ``newest`` tokens of the last as its tail."""
    device, width, total = layer.codec.view.device, layer.codec.width, layer.index.sinks
    lengths = [length for reader in readers for length in reader.lengths]
    sealed, dtype, start = sum(lengths), readers[0].dtype, 0
    sinks = []
    for reader in readers:
        own = max(min(total - start, reader.tokens), 0)
        sinks.append(reader.take_sinks(own, width, layer.codec.sink_dtype or dtype))
        start += reader.tokens
    kept = None
    if total and lengths:
        rows = torch.cat(sinks, 1).to(device)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, total - rows.shape[1]))
        kept = Sinks.standing(rows, layer.index.sink, sealed)
    tail = readers[-1].take_tail(newest, width).to(device)
    pool, table = list[Pool](), None
    if lengths:
        pool = [_segment(segment, readers, layer.stream.block, device) for segment in layer.stream.segments]
        table = torch.arange(len(lengths), device=device)[None]
    layer.restore((tail, None, kept, (pool, table, lengths, sealed, len(lengths))))


def _segment(segment: Segment, readers: Sequence[_Reader], block: int, device: torch.device) -> Pool:
    """The fields of a segment, of all blocks."""
    dense: dict[str, list[Tensor]] = defaultdict(list)
    ragged: dict[str, list[Ragged]] = defaultdict(list)
    for reader in readers:
        held: dict[str, Tensor] = {}
        blocks = len(reader.lengths)
        if not blocks:
            continue
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

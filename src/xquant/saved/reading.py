"""Reading a cache from a file. What does not fit the model and the method is refused."""

from itertools import pairwise
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..contents import others
from ..contents.contents import Contents
from ..contents.others import FLOATS
from ..past.growing_layer import CompressedLayer
from ..past.sinks import Sinks
from ..past.slabs import Slabs
from ..past.stream import Pool
from ..past.tokens import UNKNOWN
from ..quant import Segment, Streams
from ..seam.hooks import Attachment
from . import bases, entropy
from .header import Saved
from .writing import checksum, plain_name


def check_model(saved: Saved, attachment: Attachment) -> None:
    """Refuse a model that the cache is not of.

    Raises:
        ValueError: its configuration, its weights or its layers are others, or its weights cannot be read.
    """
    header, view = saved.header, attachment.view
    dtype = plain_name(view.compressed[0].dtype)
    if header.dtype != dtype:
        raise ValueError(
            f"'{saved.path}' was saved from a model in {header.dtype[:20]}, and this one is in {dtype}: load"
            " it in the same"
        )
    digests = attachment.identity.now()
    same = header.configuration == digests.configuration, header.weights == digests.weights
    if not all(same):
        names = ("configuration", "weights, buffers or adapters")
        others = " and ".join(n for n, alike in zip(names, same, strict=True) if not alike)
        raise ValueError(
            f"'{saved.path}' was saved from another model ({header.family[:80]}): the model has other"
            f" {others}"
        )
    if header.layers != [layer.index for layer in view.compressed]:
        raise ValueError(f"'{saved.path}' was saved from a model that has other layers compressed")


def fill(contents: Contents, saved: Saved) -> Tensor | None:
    """Give an empty cache, of the model and the method of the file, all that the file holds.

    Returns:
        the ids that it was saved with, int64 ``[B, T]``, if any.

    Raises:
        ValueError: the file is damaged, or was packed with another calibration or other bases.
    """
    header, codecs = saved.header, contents.codecs
    if header.calibration != codecs[0].calibrated:
        raise ValueError(
            f"'{saved.path}' was packed with another calibration of {contents.method.calibrated_as}: give the"
            " one that it was made with"
        )
    if not bases.same(header.bases, bases.probe(contents.method, codecs)):
        raise ValueError(
            f"'{saved.path}' was packed in other bases than {contents.method.spec} computes of this model"
            " here: another version or build of torch may choose others"
        )
    try:
        with safe_open(saved.source, "pt") as file:
            reader = _Reader(saved, file)
            ids = _fill(contents, reader)
            reader.check_all_read()
    except SafetensorError as error:
        raise saved.damaged(str(error)[:160]) from None
    _expect_attention(contents.attachment, saved)
    return ids


class _Reader:
    """The tensors of a file, each taken once, as it is expected."""

    def __init__(self, saved: Saved, file: Any) -> None:
        self.saved, self.header = saved, saved.header
        self._file = file
        self._left = set(file.keys())
        if self._left != self.header.checksums.keys() or not self.header.coded.keys() <= self._left:
            raise saved.damaged("it holds other tensors than its header names")

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(
        self,
        name: str,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | None, ...] | None,
        streams: Streams | None = None,
    ) -> Tensor:
        """A tensor of one of these types and of this shape, None for any, or for any length. It is a view of
        the file unless it is coded, in `streams` that are not the usual."""
        if name not in self._left:
            raise self.saved.damaged(f"it has no '{name}'")
        self._left.remove(name)
        coded = self.header.coded.get(name)
        found = self._file.get_slice(name).get_shape() if coded is None else coded[1]
        fits = shape is None or (
            len(found) == len(shape)
            and all(wanted in (None, size) for size, wanted in zip(found, shape, strict=True))
        )
        tensor: Tensor = (
            self._file.get_tensor(name) if fits else torch.empty(0, device="cpu", dtype=torch.float32)
        )
        dtype = tensor.dtype if coded is None else getattr(torch, coded[0], None)
        frames = tensor.dtype == torch.uint8 and tensor.dim() == 1
        if not fits or dtype not in dtypes or not (coded is None or frames):
            raise self.saved.damaged(f"'{name}' is of another type or shape than the method stores")
        if checksum(tensor) != self.header.checksums[name]:
            raise self.saved.damaged(f"'{name}' was altered")
        if coded is None:
            return tensor
        try:
            return entropy.decode(tensor, dtype, found, streams or Streams())
        except ValueError as error:
            raise self.saved.damaged(f"'{name}': {error}") from None

    def rows(
        self,
        name: str,
        shape: tuple[int | None, ...],
        device: torch.device,
        dtypes: tuple[torch.dtype, ...] = FLOATS,
    ) -> Tensor:
        """A copy of features."""
        return self.finite(name, dtypes, shape).to(device, copy=True)

    def finite(
        self,
        name: str,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | None, ...] | None,
        streams: Streams | None = None,
    ) -> Tensor:
        """The same as `take`, without NaN and infinity."""
        tensor = self.take(name, dtypes, shape, streams)
        fine = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        self.check(fine, f"'{name}' holds NaN or infinity")
        return tensor

    def check(self, right: bool, why: str) -> None:
        if not right:
            raise self.saved.damaged(why)

    def check_all_read(self) -> None:
        self.check(
            not self._left,
            f"it holds '{min(self._left, default='')[:80]}' that the method does not store",
        )


def _fill(contents: Contents, reader: _Reader) -> Tensor | None:
    header = reader.header
    batch, tokens = header.batch, header.tokens
    reader.check((batch > 0) == (tokens > 0), "sequences without tokens")
    if not tokens:
        reader.check(not header.blocks and not header.lengths and not header.runs, "no tokens, but blocks")
        return None
    home = contents.compressed[0].codec.view.device
    positions = reader.take("positions", (torch.int32,), (batch, tokens))
    real = reader.take("real", (torch.bool,), (batch, tokens))
    _check_runs(contents, reader)
    spans = tuple((stop, long) for stop, long in header.runs)
    ids = None
    if contents.codecs[0].embedding is not None:
        ids = reader.take("ids", (torch.int32,), (batch, tokens)).to(home, copy=True)
        reader.check(int(ids.min()) >= UNKNOWN, "an id that no token has")
    contents.index.give(positions.to(home, copy=True), real.to(home, copy=True), spans, ids)
    if "axes" in reader:
        reader.check(contents.index.takes_axes, "positions of several axes, of which the model has one")
        axes = reader.take("axes", (torch.int32,), (contents.index.axis_count, batch, tokens))
        contents.index.axes = axes.to(home, copy=True)
    saved = None
    if "tokens" in reader:
        saved = reader.take("tokens", (torch.int32,), (batch, tokens)).long()
        reader.check(int(saved.min()) >= 0, "a token has no id")
    lengths, table = _table(reader, contents.method.group)
    for layer in contents.compressed:
        _fill_layer(layer, reader, lengths, table)
    others.fill(contents, reader, batch, tokens, header.recording)
    return saved


def _check_runs(contents: Contents, reader: _Reader) -> None:
    """Spans of tokens end one after the other, the last with the last token, and neighbours differ."""
    spans, before = reader.header.runs, 0
    if not contents.attachment.view.rope.switches:
        return reader.check(not spans, "spans of frequencies, of which the model has one set")
    kinds = [long for _, long in spans]
    reader.check(all(a != b for a, b in pairwise(kinds)), "spans that are one")
    for stop, _ in spans:
        reader.check(stop > before, "spans that do not follow each other")
        before = stop
    reader.check(before == reader.header.tokens, "spans of more or fewer tokens than there are")


def _table(reader: _Reader, block: int) -> tuple[list[int], Tensor | None]:
    """The lengths of a sequence's blocks, and the blocks of each sequence, int64 ``[B, columns]``."""
    header = reader.header
    if not header.lengths:
        reader.check(not header.blocks, "blocks of no length")
        return [], None
    found = reader.take("table", (torch.int32,), (header.batch, None))
    columns = found.shape[1]
    reader.check(sum(count for _, count in header.lengths) == columns, "more or fewer blocks than lengths")
    reader.check(
        all(0 < length <= block for length, _ in header.lengths),
        "a block of a length that it cannot have",
    )
    lengths = [length for length, count in header.lengths for _ in range(count)]
    reader.check(sum(lengths) <= header.tokens, "more tokens in blocks than there are")
    used = found.unique()
    right = len(used) == header.blocks and int(used[0]) == 0 and int(used[-1]) == header.blocks - 1
    reader.check(right, "sequences of other blocks than there are")
    return lengths, found.long()


def _fill_layer(layer: CompressedLayer, reader: _Reader, lengths: list[int], table: Tensor | None) -> None:
    header, codec, stream = reader.header, layer.codec, layer.stream
    name, device, sealed = str(codec.view.index), codec.view.device, sum(lengths)
    tail = reader.rows(f"{name}.tail", (header.batch, header.tokens - sealed, codec.width), device)
    sinks = None
    if f"{name}.sinks" in reader:
        shape = (header.batch, layer.index.sinks, codec.width)
        kept = codec.sink_dtype or tail.dtype
        rows = reader.rows(f"{name}.sinks", shape, device, (tail.dtype, kept)).to(kept)
        sinks = Sinks.standing(rows, layer.index.sink, sealed)
    else:
        reader.check(not bool(layer.index.sink[:, :sealed].any()), f"layer {name} has no sinks")
    pool: list[Pool] = []
    if table is not None:
        table = table.to(device, copy=True)
        for number, segment in enumerate(stream.segments):
            pool.append(_segment(reader, f"{name}.{number}", segment, stream.block, device))
    stream_state = pool, table, list(lengths), sealed, header.blocks
    layer.restore((tail, None, sinks, stream_state))


def _segment(reader: _Reader, name: str, segment: Segment, block: int, device: torch.device) -> Pool:
    """The packed fields of all blocks of a segment."""
    count, quantizer = reader.header.blocks, segment.quantizer
    fields: Pool = {}
    for field, stored in segment.fields(block).items():
        slabs: Slabs | None = None
        while slabs is None or len(slabs) < count:
            piece = f"{name}.{field}.{0 if slabs is None else len(slabs.slabs)}"
            streams = quantizer.streams(field, block)
            shape = (None, *stored.shape)
            blocks = reader.finite(piece, (stored.dtype,), shape, streams).to(device)
            reader.check(len(blocks) > 0, f"'{piece}' is empty")
            if slabs is None:
                slabs = Slabs(blocks)
            else:
                slabs.append(blocks)
        reader.check(len(slabs) == count, f"'{name}.{field}' has more blocks than there are")
        fields[field] = slabs
    if quantizer.ragged:
        flat = {
            field: reader.finite(f"{name}.{field}.0", (dtype,), (None,)).to(device)
            for field, dtype in quantizer.ragged.items()
        }
        dense = {field: slabs.whole() for field, slabs in fields.items() if isinstance(slabs, Slabs)}
        try:
            fields |= quantizer.cut(dense, flat, segment.channels)
        except ValueError as error:
            raise reader.saved.damaged(f"'{name}': {error}") from None
    return fields


def _expect_attention(attachment: Attachment, saved: Saved) -> None:
    """Spare the first forward pass finding out what the file knows: with which attention implementation of
    this version of transformers the layers pass on what a cache returns. Until a layer is seen to, it is
    given keys and values decoded, which its own implementation rounds otherwise than a kernel."""
    attachment.see_implementation()
    for hooks in attachment.hooks.values():
        known = saved.header.attention == hooks.implementation
        same = saved.header.transformers == transformers.__version__
        if known and same and hooks.passes_on is None and hooks.view.latents is None:
            hooks.learn(True)

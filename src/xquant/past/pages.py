"""Pages: packed blocks in memory that somebody else owns, all fields of a block beside each other.

A `Stream` keeps the blocks of each field apart, in slabs that grow. An engine that serves many sequences
gives out memory in pages of one size instead: a page is one block of one layer. The fields are those of the
stream, byte for byte, as `Segment.fields` describes them; only where they lie differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant import Packed, Segment
from ..quant.outliers import RAGGED, from_room, into_room
from ..quant.quantizer import Field, dense
from .packer import Packer

ALIGNMENT = 64
"""Every field of a page starts at a multiple of so many bytes: a line of the CPU's cache."""
ROOM = 1.5
"""A page has room for so many times the outliers that a block is expected to have."""


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Place:
    """A field of a segment in a page."""

    segment: int
    name: str
    field: Field
    start: int
    """Its first byte in the page."""


class PageLayout:
    """Where the fields of a block lie in a page.

    Args:
        segments: the packed layout along the channels, as of a `Stream`.
        block: tokens per block ``n``.

    Outliers, of which blocks have more and fewer, have a fixed room in a page (`ROOM`).

    Raises:
        ValueError: blocks that have no bytes of their own: they share codes.
    """

    def __init__(self, segments: Sequence[Segment], block: int) -> None:
        self.segments, self.block = tuple(segments), block
        if any(segment.shared for segment in segments):
            raise ValueError("layers share codes, and a page holds those of one layer")
        self.places: list[Place] = []
        start = 0
        for number, segment in enumerate(segments):
            for name, field in self._fields_of(segment).items():
                self.places.append(Place(number, name, field, start))
                start += aligned(field.nbytes)
        self.nbytes = start
        """Bytes of a page."""

    def _fields_of(self, segment: Segment) -> dict[str, Field]:
        found, block, quantizer = segment.fields(self.block), self.block, segment.quantizer
        if quantizer.sparse:
            expected = quantizer.expected_outliers(1, block, segment.channels, block)
            room = aligned(math.ceil(ROOM * expected), ALIGNMENT // 2)
            found |= {name: Field((room,), dtype, "outliers") for name, dtype in RAGGED.items()}
        return found

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the block in a page, without those that only align its fields."""
        return sum(place.field.nbytes for place in self.places)

    def fields(self, pages: Tensor) -> list[Packed]:
        """The fields of every page by segment: views of ``pages``, uint8 ``[N, nbytes]`` or more, which may
        lie at any stride that is a multiple of `ALIGNMENT`."""
        found: list[Packed] = [{} for _ in self.segments]
        for place in self.places:
            part = pages[:, place.start : place.start + place.field.nbytes]
            found[place.segment][place.name] = part.view(place.field.dtype).unflatten(1, place.field.shape)
        return found

    def compact(self, pages: Tensor) -> Tensor:
        """The fields of pages alone, beside each other, ``[N, packed_nbytes]``; ``pages`` as in `fields`."""
        parts = [pages[:, place.start : place.start + place.field.nbytes] for place in self.places]
        return torch.cat(parts, 1)

    def spread(self, packed: Tensor) -> Tensor:
        """The inverse of `compact`: pages ``[N, nbytes]``."""
        pages = packed.new_zeros(len(packed), self.nbytes)
        parts = packed.split([place.field.nbytes for place in self.places], 1)
        for place, part in zip(self.places, parts, strict=True):
            pages[:, place.start : place.start + place.field.nbytes] = part
        return pages

    def addresses(self, pages: Tensor) -> list[dict[str, Tensor]]:
        """Where every field of every page lies in memory by segment, int64 ``[N]`` on the CPU: what kernels
        take. ``pages`` as in `fields`."""
        begins = pages.data_ptr() + torch.arange(len(pages), device="cpu") * pages.stride(0)
        found: list[dict[str, Tensor]] = [{} for _ in self.segments]
        for place in self.places:
            found[place.segment][place.name] = begins + place.start
        return found


class Pages:
    """The packed blocks of one layer in pages.

    Args:
        layout: of a page.
        pages: uint8 ``[N, layout.nbytes]`` or more.
        packer: what packs and unpacks blocks.
    """

    def __init__(self, layout: PageLayout, pages: Tensor, packer: Packer) -> None:
        self.layout, self.packer = layout, packer
        self._fields, self._device = layout.fields(pages), pages.device
        self.dropped = 0
        """Outliers that found no room, and are read as their codes."""

    def write(self, numbers: Tensor, rows: Tensor, excluded: Tensor | None = None) -> None:
        """Pack blocks ``rows`` ``[m, n, C]`` into the pages of these ``numbers`` ``[m]``. ``excluded``, bool
        ``[m, n]``: tokens that set no range.

        Raises:
            ValueError: NaN; no page was written to.
        """
        segments = self.layout.segments
        packed = self.packer.pack_segments(segments, rows, excluded)
        for segment, fields, new in zip(segments, self._fields, packed, strict=True):
            if segment.quantizer.sparse:
                new, dropped = into_room(new, dense(fields, "outlier_excess").shape[1])
                self.dropped += dropped
            for name in fields:
                dense(fields, name)[numbers] = dense(new, name)

    def read(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """The blocks in the pages of these ``numbers`` ``[m]``, decoded: ``[m, n, C]``."""
        widths = [segment.channels for segment in self.layout.segments]
        shape = len(numbers), self.layout.block, sum(widths)
        rows = torch.empty(shape, dtype=dtype, device=self._device)
        for segment, fields, out in zip(
            self.layout.segments, self._fields, rows.split(widths, -1), strict=True
        ):
            packed: Packed = {name: dense(fields, name)[numbers] for name in fields}
            if segment.quantizer.sparse:
                packed = from_room(packed)
            self.packer.unpack(segment.quantizer, packed, out)
        return rows

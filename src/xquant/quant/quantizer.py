"""Quantizers: how one segment of channels of a sealed block is stored.

A quantizer turns a batch of blocks ``[N, n, C]`` (``N`` blocks of ``n`` tokens) into named tensors, its
fields, whose first dimension is ``N``, and back. It says itself what a block takes: the shape and type of
every field, and whether the number of outliers depends on the text. Planning, reports and kernels ask it
that; none of them tests for a class.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .affine import FP16_MAX
from .operand import Operand, RankedOperand
from .ragged import Ragged
from .streams import Streams

Packed = dict[str, Tensor | Ragged]
Granularity = Literal["token", "channel"]
Part = Literal["codes", "ranges", "outliers"]
"""What bytes of a block are: its codes (or values that are kept as they are), the ranges of codes, or the
counts of outliers."""

OUTLIER_NBYTES = 4
"""Of one outlier: its residual in fp16 and a 16-bit channel."""


@dataclass(frozen=True)
class Field:
    """A packed tensor of one block: every block has as many bytes of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, blocks: int, device: torch.device | str = "cpu") -> Tensor:
        """Memory for so many blocks."""
        return torch.empty(blocks, *self.shape, dtype=self.dtype, device=device)


class Quantizer(ABC):
    """How rows of blocks are stored and read.

    `encode`, `decode` and `fields` are all that a new quantizer must have. The defaults of the rest are those
    of a quantizer without tables whose bytes do not depend on the text.
    """

    @abstractmethod
    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        """Pack blocks.

        Args:
            x: ``[N, n, C]``, floating point.
            excluded: bool ``[N, n]``: tokens that are kept elsewhere (sinks, padding) and must not set a
                range.

        Returns:
            the `fields`, each with a leading dimension ``N``. A field that differs in length from block to
            block is `Ragged`, and is not among `fields` but `ragged`.

        Raises:
            ValueError: NaN in a token that sets a range.
        """

    @abstractmethod
    def decode(self, packed: Packed, out: Tensor) -> None:
        """Unpack blocks into ``out`` ``[N, n, C]``, which may be some columns of a wider tensor."""

    @abstractmethod
    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        """The packed tensors of a block of ``tokens`` x ``channels``, in the order of `encode`; those of
        outliers (`Ragged`) apart.

        Raises:
            ValueError: blocks of this size cannot be stored.
        """

    @property
    def sparse(self) -> bool:
        """Whether outliers are stored apart, so that the bytes of a block depend on the text. Each takes
        `OUTLIER_NBYTES`."""
        return False

    @property
    def ragged(self) -> dict[str, torch.dtype]:
        """The `Ragged` fields and their types."""
        return {}

    def cut(
        self, fields: Mapping[str, Tensor], flat: Mapping[str, Tensor], channels: int
    ) -> dict[str, Ragged]:
        """The `ragged` fields of blocks with these `fields`, from all of their runs after each other.

        Raises:
            ValueError: they cannot be those of these blocks.
        """
        return {}

    def expected_outliers(self, blocks: int, tokens: int, channels: int, seen: int) -> float:
        """How many outliers to expect in ``blocks`` of ``tokens`` x ``channels``. Sinks have none; ``seen``
        are the tokens of all these blocks that are no sinks."""
        return 0.0

    def operand(self, tokens: int, channels: int) -> Operand | RankedOperand | None:
        """What a kernel needs to know to multiply with blocks of ``tokens`` x ``channels``; None where there
        are no codes, or none that a kernel knows."""
        return None

    def streams(self, field: str, tokens: int) -> Streams:
        """How an entropy coder takes a field of blocks of ``tokens`` apart."""
        return Streams()

    @property
    def channels(self) -> int | None:
        """How many channels its tables are for; None where it has none by channel."""
        return None

    @property
    def tables(self) -> list[Tensor]:
        """What all blocks share, whatever their number: codebooks, offline ranges."""
        return []

    @property
    def table_nbytes(self) -> int:
        """Bytes of the `tables`."""
        return sum(table.nbytes for table in self.tables)

    def tiled(self, head: int, lanes: Literal["tokens", "channels"]) -> "Quantizer":
        """This quantizer with its codes in tiles (`pack.Tile`), where it has codes that can be."""
        return self


@dataclass(frozen=True)
class Plain(Quantizer):
    """No quantization: rows are stored in ``dtype``, which is the identity for the model's own."""

    dtype: torch.dtype

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        if self.dtype == torch.float16:
            x = x.clamp(-FP16_MAX, FP16_MAX)
        return {"values": x.to(self.dtype, copy=True)}

    def decode(self, packed: Packed, out: Tensor) -> None:
        out.copy_(dense(packed, "values"))

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        return {"values": Field((tokens, channels), self.dtype, "codes")}


def dense(packed: Packed, name: str) -> Tensor:
    """A field of which every block has as much."""
    tensor = packed[name]
    assert isinstance(tensor, Tensor)
    return tensor


@dataclass(frozen=True)
class Segment:
    """A run of neighbouring channels stored by one quantizer.

    Args:
        shared: it has no codes of its own, but reads those of the same segment in another layer's stream with
            its own ranges.
        predictor: fp32 ``[C, C']``: predicts this segment's channels from the ``C'`` decoded channels of the
            segment before it. Its prediction is taken off before packing. The codec's synthesis adds it when
            rows are read.

    Raises:
        ValueError: the quantizer has tables for another number of channels.
    """

    channels: int
    quantizer: Quantizer
    shared: bool = False
    predictor: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        made_for = self.quantizer.channels
        if made_for not in (None, self.channels):
            raise ValueError(f"a quantizer of {made_for} channels cannot store {self.channels}")

    def fields(self, tokens: int) -> dict[str, Field]:
        """What is stored here of a block of ``tokens``: `Quantizer.fields`, without shared codes."""
        every = self.quantizer.fields(tokens, self.channels)
        return {n: f for n, f in every.items() if not (self.shared and f.part == "codes")}

    def parts(self, tokens: int) -> Counter[Part]:
        """Bytes of a block by what they are, without outliers and shared codes."""
        found: Counter[Part] = Counter()
        for each in self.fields(tokens).values():
            found[each.part] += each.nbytes
        return found

    def operand(self, tokens: int) -> Operand | RankedOperand | None:
        """See `Quantizer.operand`."""
        return self.quantizer.operand(tokens, self.channels)

    def expected_outliers(self, blocks: int, tokens: int, seen: int) -> float:
        """See `Quantizer.expected_outliers`."""
        return self.quantizer.expected_outliers(blocks, tokens, self.channels, seen)


def as_written(x: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off, so that quantizers and kernels compute in the dtypes that they name. Autocast
    would also refuse to concatenate fp64 scales."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    return torch.autocast(kind, enabled=False)


_AS_IT_IS = nullcontext()

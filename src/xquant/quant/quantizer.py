"""Quantizers: how one segment of channels of a sealed block is stored.

A quantizer turns a batch of blocks ``[N, n, C]`` (``N`` blocks of ``n`` tokens) into named tensors
whose first dimension is ``N``, and back. ``nbytes`` states what one block takes; the tests hold it
against what the tensors really hold.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from .affine import FP16_MAX, dequantize, quantize
from .codebook import Bounds, nearest, normalize, outside, ranges, scale_of
from .operand import Operand, RankedOperand
from .pack import Tile, pack, packed_rows, unpack
from .ragged import Ragged

Packed = dict[str, Tensor | Ragged]
Granularity = Literal["token", "channel"]


class Quantizer(Protocol):
    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        """Blocks ``[N, n, C]`` to tensors of leading dimension ``N``; see :func:`quantize`."""
        ...

    def decode(self, packed: Packed, out: Tensor) -> None:
        """Back to rows, written into ``out`` ``[N, n, C]``."""
        ...

    def nbytes(self, tokens: int, channels: int) -> int:
        """Bytes that one block of ``tokens`` x ``channels`` takes, before any outliers."""
        ...

    def operand(self, tokens: int, channels: int) -> Operand | RankedOperand | None:
        """What a kernel needs to know to multiply with blocks of ``tokens`` x ``channels``; None where there
        are no codes."""
        ...

    @property
    def channels(self) -> int | None:
        """How many channels its tables are for; None where it has none by channel."""
        ...

    @property
    def table_nbytes(self) -> int:
        """Bytes that all blocks share (codebook, offline scales), whatever their number."""
        ...


@dataclass(frozen=True)
class Plain:
    """No quantization: rows are stored in ``dtype``, which is the identity for the model's own."""

    dtype: torch.dtype
    channels = None
    table_nbytes = 0

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        if self.dtype == torch.float16:
            x = x.clamp(-FP16_MAX, FP16_MAX)
        return {"values": x.to(self.dtype, copy=True)}

    def decode(self, packed: Packed, out: Tensor) -> None:
        out.copy_(dense(packed, "values"))

    def nbytes(self, tokens: int, channels: int) -> int:
        return tokens * channels * self.dtype.itemsize

    def operand(self, tokens: int, channels: int) -> None:
        return None


def tiled(quantizer: Quantizer, head: int, lanes: Literal["tokens", "channels"]) -> Quantizer:
    """``quantizer`` with its codes in tiles, where it has codes."""
    if isinstance(quantizer, _Grouped):
        return replace(quantizer, tile=Tile(head, lanes))
    return quantizer


def dense(packed: Packed, name: str) -> Tensor:
    """A field of which every block has as much."""
    tensor = packed[name]
    assert isinstance(tensor, Tensor)
    return tensor


@dataclass(frozen=True)
class _Grouped:
    """Codes of ``bits`` bits with a range per group.

    ``per="token"``: as few groups of at most ``group`` channels within a token as there can be, all of
    one size (the last may be shorter): 192 channels in groups of 128 are twice 96. ``per="channel"``:
    groups of ``group`` tokens within a channel. 0 is the whole token, or the block.

    ``tile`` orders the codes of a whole block for the kernels; None leaves them in rows.
    """

    bits: int
    per: Granularity
    group: int
    tile: Tile | None = field(default=None, kw_only=True)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes ``[N, n, C]`` as they are stored."""
        if self.tile is not None and self.tile.fits(codes.shape[-2]):
            codes = self.tile.arrange(codes)
        return pack(codes, self.bits)

    def unpack(self, packed: Tensor, tokens: int) -> Tensor:
        """The inverse of `pack`: ``[N, tokens, C]``."""
        if self.tile is None or not self.tile.fits(tokens):
            return unpack(packed, self.bits, tokens)
        summed = self.tile.head if self.tile.lanes == "tokens" else tokens
        return self.tile.restore(unpack(packed, self.bits, summed // 4))

    def _by_range(self, tokens: int) -> bool:
        """Whether ranges per token lie range by range ``[N, ranges, n]``, next to tiles."""
        return self.per == "token" and self.tile is not None and self.tile.fits(tokens)

    def _pack_ranges(self, scale: Tensor, zero: Tensor) -> "Packed":
        if self._by_range(scale.shape[-2]):
            scale, zero = scale.mT.contiguous(), zero.mT.contiguous()
        return {"scale": scale, "zero": zero}

    def unpack_ranges(self, packed: "Packed", tokens: int) -> tuple[Tensor, Tensor]:
        """Scale and zero of blocks: ``[N, tokens, ranges]`` per token, ``[N, ranges, C]`` per channel."""
        scale, zero = dense(packed, "scale"), dense(packed, "zero")
        return (scale.mT, zero.mT) if self._by_range(tokens) else (scale, zero)

    @property
    def _dim(self) -> int:
        return -1 if self.per == "token" else -2

    def range_size(self, along: int) -> int:
        """Elements of a range along an axis of this length."""
        if self.group == 0:
            return along
        return -(-along // -(-along // self.group)) if self.per == "token" else self.group

    def operand(self, tokens: int, channels: int) -> Operand:
        per_token = self.per == "token"
        group = self.range_size(channels if per_token else tokens)
        return Operand(channels, self.bits, per_token, group, self.tile)

    def _range_nbytes(self, tokens: int, channels: int) -> int:
        along, across = (channels, tokens) if self.per == "token" else (tokens, channels)
        return -(-along // self.range_size(along)) * across * (2 + 2)

    def nbytes(self, tokens: int, channels: int) -> int:
        codes = packed_rows(tokens, self.bits) * channels
        return codes + self._range_nbytes(tokens, channels)


@dataclass(frozen=True)
class Affine(_Grouped):
    """Asymmetric uniform codes of ``bits`` bits with fp16 scale and zero per group; see `affine`."""

    eta: float = 0.0
    channels = None
    table_nbytes = 0

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        size = self.range_size(x.shape[self._dim])
        codes, scale, zero = quantize(x, self.bits, self._dim, size, excluded, self.eta)
        return {"codes": self.pack(codes), **self._pack_ranges(scale, zero)}

    def decode(self, packed: Packed, out: Tensor) -> None:
        codes = self.unpack(dense(packed, "codes"), out.shape[-2])
        size = self.range_size(out.shape[self._dim])
        scale, zero = self.unpack_ranges(packed, out.shape[-2])
        dequantize(codes, scale, zero, self._dim, size, out)


@dataclass(frozen=True, eq=False)
class Codebook(_Grouped):
    """Non-uniform codes and sparse outliers; see `codebook`.

    Args:
        levels: ``[2**bits]``, sorted, in [-1, 1].
        share: of each vector's elements stored apart, as outliers found when a block is sealed.
        threshold: elements outside are the outliers instead; broadcasts with ``[C]``.
        span: lowest and highest of every channel ``[C]``, offline; scale and zero are then not stored
            with the block, and elements outside that are no outliers are clipped.

    Levels and bounds are kept in fp16, where they saturate.

    Raises:
        ValueError: levels or bounds of another shape, levels that are not sorted, NaN.
    """

    levels: Tensor
    share: float = 0.0
    threshold: Bounds | None = None
    span: Bounds | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _half(self.levels))
        halves = {id(t): _half(t) for pair in (self.threshold, self.span) if pair for t in pair}
        for name in ("threshold", "span"):
            if (pair := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(halves[id(t)] for t in pair))
        self._check()

    def _check(self) -> None:
        if self.levels.shape != (2**self.bits,):
            raise ValueError(f"levels of {self.bits} bits are not {list(self.levels.shape)}")
        if any(t.dim() > 1 for t in self.tables) or len(self._widths) > 1:
            raise ValueError("bounds are one number for all channels, or one for each")
        # On the meta device there are no numbers.
        if any(not t.is_meta and bool(t.isnan().any()) for t in self.tables):
            raise ValueError("levels or bounds hold NaN")
        if not self.levels.is_meta and bool((self.levels[1:] < self.levels[:-1]).any()):
            raise ValueError("levels are not in rising order")

    @property
    def _widths(self) -> set[int]:
        """For how many channels there are bounds; a threshold may be one number for all."""
        thresholds = {t.numel() for t in self.threshold or ()} - {1}
        return thresholds | {t.numel() for t in self.span or ()}

    @property
    def channels(self) -> int | None:
        return next(iter(self._widths), None)

    @property
    def sparse(self) -> bool:
        """Whether outliers are stored apart."""
        return self.share > 0 or self.threshold is not None

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        scaled = self.scaled(x, excluded)
        codes = nearest(scaled.x, self.levels.to(x.device).float())
        packed: Packed = {"codes": self.pack(codes)}
        if self.span is None:
            packed |= self._pack_ranges(scaled.scale, scaled.zero)
        if self.sparse:
            assert scaled.outliers is not None
            coded = torch.empty_like(x, dtype=torch.float32)
            self._restore(codes, packed, coded)
            exact = x.float().clamp(-FP16_MAX, FP16_MAX)
            packed |= pack_outliers(exact - coded, scaled.outliers)
        return packed

    def scaled(self, x: Tensor, excluded: Tensor | None) -> "Scaled":
        """Blocks ``[N, n, C]`` in the range of the levels, without rounding them to one."""
        x = x.float().clamp(-FP16_MAX, FP16_MAX)
        if torch.isnan(x).any():
            raise ValueError("NaN cannot be quantized")
        hidden = None if excluded is None else excluded.unsqueeze(-1).expand_as(x)
        if self.span is not None:
            scale, zero = self._fixed(x)
            outliers = None
            if self.threshold is not None:
                outliers = outside(x, _to(self.threshold, x), hidden)
            return Scaled(normalize(x, scale, zero), scale, zero, scale.expand_as(x), outliers)
        dim, size = self._dim, self.range_size(x.shape[self._dim])
        threshold = None if self.threshold is None else _to(self.threshold, x)
        scale, zero, outliers = ranges(x, dim, size, hidden, self.share, threshold)
        wide, middle = (
            t.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim]) for t in (scale, zero)
        )
        return Scaled(normalize(x, wide, middle), scale, zero, wide, outliers)

    def offline_ranges(self) -> tuple[Tensor, Tensor] | None:
        """Scale and zero ``[C]`` (fp16) of all blocks, where they are not stored with each."""
        if self.span is None:
            return None
        low, high = self.span
        return scale_of(low.float(), high.float())

    def _fixed(self, like: Tensor) -> tuple[Tensor, Tensor]:
        assert self.span is not None
        return scale_of(*_to(self.span, like))

    def decode(self, packed: Packed, out: Tensor) -> None:
        codes = self.unpack(dense(packed, "codes"), out.shape[-2])
        if not self.sparse:
            return self._restore(codes, packed, out)
        exact = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._restore(codes, packed, exact)
        add_outliers(packed, exact)
        if exact is not out:
            out.copy_(exact.clamp_(-FP16_MAX, FP16_MAX))

    def _restore(self, codes: Tensor, packed: Packed, out: Tensor) -> None:
        """Codes ``[N, n, C]`` in the ranges that are packed with them, without outliers."""
        levels = self.levels.to(out.device).float()[codes.int()]
        if self.span is None:
            dim, size = self._dim, self.range_size(out.shape[self._dim])
            scale, zero = self.unpack_ranges(packed, out.shape[-2])
        else:
            dim, size = -2, out.shape[-2]
            scale, zero = (t.unsqueeze(0) for t in self._fixed(out))
        dequantize(levels, scale, zero, dim, size, out)

    def _range_nbytes(self, tokens: int, channels: int) -> int:
        return 0 if self.span is not None else super()._range_nbytes(tokens, channels)

    def nbytes(self, tokens: int, channels: int) -> int:
        counts = tokens * _count_dtype(channels).itemsize if self.sparse else 0
        return super().nbytes(tokens, channels) + counts

    def operand(self, tokens: int, channels: int) -> Operand:
        counted = _count_dtype(channels).itemsize if self.sparse else 0
        return replace(
            super().operand(tokens, channels),
            levels=self.levels,
            fixed=self.offline_ranges(),
            count_bytes=counted,
        )

    @property
    def tables(self) -> list[Tensor]:
        """The codebook and what else is offline."""
        pairs = [pair for pair in (self.threshold, self.span) if pair is not None]
        return list(
            {id(t): t for t in (self.levels, *(t for pair in pairs for t in pair))}.values()
        )

    @property
    def table_nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)


def _half(x: Tensor) -> Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).half()


def _to(bounds: Bounds, like: Tensor) -> Bounds:
    low, high = (t.to(like.device).float() for t in bounds)
    return low, high


@dataclass(frozen=True)
class Scaled:
    """Blocks ``[N, n, C]`` mapped to the range of the levels."""

    x: Tensor  # fp32, in [-1, 1] but for outliers and what is clipped
    scale: Tensor  # fp16, as it is stored
    zero: Tensor
    wide_scale: Tensor  # that of every element
    outliers: Tensor | None  # bool [N, n, C]


OUTLIER_NBYTES = 4
"""Of one outlier: an fp16 number and a 16-bit channel."""


def _count_dtype(channels: int) -> torch.dtype:
    return torch.uint8 if channels < 256 else torch.int16


def pack_outliers(excess: Tensor, outliers: Tensor) -> Packed:
    """The elements ``excess[outliers]`` of blocks ``[N, n, C]``, token by token: what the outliers are
    more than their codes say, so that a kernel adds them without looking at codes and ranges.

    ``outlier_count`` ``[N, n]`` of each token; per block, one after the other, ``outlier_excess`` (fp16)
    and ``outlier_channel`` (unsigned, kept in int16).
    """
    counts = outliers.sum(-1)
    channels = outliers.nonzero(as_tuple=True)[-1]
    values = excess[outliers].clamp(-FP16_MAX, FP16_MAX).half()
    per_block = counts.sum(-1)
    return {
        "outlier_count": counts.to(_count_dtype(excess.shape[-1])),
        "outlier_excess": Ragged.split(values, per_block),
        "outlier_channel": Ragged.split(channels.to(torch.int16), per_block),
    }


def add_outliers(packed: Packed, out: Tensor) -> None:
    """Add to blocks ``out`` ``[N, n, C]`` (fp32) what their outliers are more than their codes say."""
    values, channels = packed["outlier_excess"], packed["outlier_channel"]
    assert isinstance(values, Ragged) and isinstance(channels, Ragged)
    counts = dense(packed, "outlier_count").flatten().long()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    channel = channels.flat().long() & 0xFFFF
    tokens = out.shape[1]
    out[rows // tokens, rows % tokens, channel] += values.flat().float()


@dataclass(frozen=True)
class Segment:
    """A run of neighbouring channels stored by one quantizer.

    ``borrows``: its codes are those of the same segment in another layer's stream; only what its own
    ranges need is stored here.

    Raises:
        ValueError: the quantizer has tables for another number of channels.
    """

    channels: int
    quantizer: Quantizer
    borrows: bool = False

    def __post_init__(self) -> None:
        made_for = self.quantizer.channels
        if made_for not in (None, self.channels):
            raise ValueError(f"a quantizer of {made_for} channels cannot store {self.channels}")

    def operand(self, tokens: int) -> Operand | RankedOperand | None:
        """See `Quantizer.operand`."""
        return self.quantizer.operand(tokens, self.channels)

    def nbytes(self, tokens: int) -> int:
        """Bytes of one block of ``tokens``, before any outliers."""
        size = self.quantizer.nbytes(tokens, self.channels)
        if self.borrows:
            assert isinstance(self.quantizer, Affine)
            size -= packed_rows(tokens, self.quantizer.bits) * self.channels
        return size

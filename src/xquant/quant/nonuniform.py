"""The quantizer of non-uniform codes with outliers apart (KVQuant, arXiv 2401.18079)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .affine import FP16_MAX, checked, dequantize
from .codebook import Bounds, nearest, normalize, outlier_count, outside, ranges, scale_of
from .grouped import Grouped
from .operand import Operand
from .outliers import RAGGED, add_outliers, count_dtype, cut_outliers, pack_outliers
from .quantizer import Field, Packed, dense
from .ragged import Ragged


@dataclass(frozen=True, eq=False)
class Codebook(Grouped):
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

    @property
    def ragged(self) -> dict[str, torch.dtype]:
        return RAGGED if self.sparse else {}

    def cut(
        self, fields: Mapping[str, Tensor], flat: Mapping[str, Tensor], channels: int
    ) -> dict[str, Ragged]:
        return cut_outliers(fields["outlier_count"], flat, channels) if self.sparse else {}

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        scaled = self.scaled(x, excluded)
        codes = nearest(scaled.x, self.levels.to(x.device).float())
        return self.assembled(x, scaled, codes, self.pack(codes))

    def assembled(self, x: Tensor, scaled: "Scaled", codes: Tensor, in_bits: Tensor) -> Packed:
        """What is stored of blocks ``x`` whose codes ``[N, n, C]`` are packed as ``in_bits``."""
        packed: Packed = {"codes": in_bits}
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
        x = checked(x)
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
        wide, middle = (t.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim]) for t in (scale, zero))
        return Scaled(normalize(x, wide, middle), scale, zero, wide, outliers)

    def _fixed(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero ``[C]`` (fp16) of all blocks, where they are not stored with each."""
        assert self.span is not None
        return scale_of(*_to(self.span, like))

    def decode(self, packed: Packed, out: Tensor) -> None:
        codes = self.unpack(dense(packed, "codes"), *out.shape[-2:])
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

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        """As of `Grouped`; without ranges where they are offline, and with ``outlier_count`` ``[n]``."""
        found = super().fields(tokens, channels)
        if self.span is not None:
            del found["scale"], found["zero"]
        if self.sparse:
            found["outlier_count"] = Field((tokens,), count_dtype(channels), "outliers")
        return found

    def operand(self, tokens: int, channels: int) -> Operand:
        return replace(
            super().operand(tokens, channels),
            levels=self.levels,
            offline=None if self.span is None else self._fixed(self.span[0]),
            count_bytes=count_dtype(channels).itemsize if self.sparse else 0,
        )

    def expected_outliers(self, blocks: int, tokens: int, channels: int, seen: int) -> float:
        """Those found when a block is sealed are as many in every vector, unless elements tie; those outside
        thresholds found offline are their share of a text like that of the calibration."""
        if self.threshold is not None:
            return self.share * seen * channels
        if self.per == "token":
            size = self.range_size(channels)
            return seen * -(-channels // size) * outlier_count(self.share, size)
        return blocks * channels * outlier_count(self.share, tokens)

    @property
    def tables(self) -> list[Tensor]:
        """The codebook and what else is offline."""
        every = self.levels, *(self.threshold or ()), *(self.span or ())
        return list({id(t): t for t in every}.values())


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

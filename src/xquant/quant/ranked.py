"""Transform codes: every channel of a block has a scale, every token a gain, and the channels with the
largest scales get the widest codes.

``x ~ level[code] * scale * gain``, with the levels of `levels.ranked_levels`. Scales and gains are powers of
``2 ** (1 / STEPS)``, kept as 4 bits: a channel's above its lowest, the nearest to its root mean square in the
block; a token's around 1. Decoding finds the order of the scales as encoding did, so that no widths are
stored, every block takes the same bytes, and none depends on another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .affine import FP16_MAX
from .levels import distortion, edges_of, ranked_levels
from .operand import RankedOperand
from .pack import pack, packed_rows, unpack
from .quantizer import Field, Packed, Quantizer, dense
from .streams import RunStreams, Streams

STEPS = 3
"""Scales to an octave."""
ABOVE = 5
"""The place among a channel's 16 scales, from the top, of the one that is usual."""
EVEN = 8
"""The place of a gain of 1 among 16."""
WIDEST = 8


@dataclass(frozen=True, eq=False)
class Ranked(Quantizer):
    """Codes of 0 to 8 bits, by the rank of a channel's scale.

    Args:
        usual: the logarithm of every channel's usual scale, in steps, int16 ``[C]``.
        counts: how many channels get 1, 2, ... 8 bits.

    Raises:
        ValueError: ``usual`` is of another type or shape, or the counts are not those of so many channels.
    """

    usual: Tensor
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        usual, counts = self.usual, self.counts
        if usual.dtype != torch.int16 or usual.dim() != 1:
            raise ValueError(f"usual scales are int16 [C], not {usual.dtype} {list(usual.shape)}")
        if len(counts) != WIDEST or min(counts) < 0 or sum(counts) > len(usual):
            raise ValueError(f"{len(usual)} channels cannot have codes of 1 to 8 bits in {counts}")
        object.__setattr__(self, "usual", usual.contiguous())

    @property
    def channels(self) -> int:
        """``C``."""
        return len(self.usual)

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Bits and channels of each run of equal widths, the widest first."""
        return [(b, n) for b, n in reversed(list(enumerate(self.counts, 1))) if n]

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        packed, even, power = self._measured(x, excluded)
        order = self._order(power)
        scaled = (even / _size(power).unsqueeze(1)).gather(2, order[:, None].expand_as(even))
        runs, start = [scaled.new_empty(len(x), 0, dtype=torch.uint8)], 0
        for bits, count in self.widths:
            part = scaled[..., start : start + count].contiguous()
            codes = torch.bucketize(part, edges_of(ranked_levels(bits)).to(x.device))
            runs.append(pack(codes.to(torch.uint8), bits).flatten(1))
            start += count
        packed["codes"] = torch.cat(runs, 1)
        return packed

    def _measured(self, x: Tensor, excluded: Tensor | None) -> tuple[Packed, Tensor, Tensor]:
        """The scales and gains of blocks ``[N, n, C]`` as they are stored, the blocks divided by their gains
        (fp32), and the logarithms of the scales ``[N, C]``.

        Raises:
            ValueError: NaN.
        """
        x = x.float().clamp(-FP16_MAX, FP16_MAX)
        loud = _sum(x.square() / _variance(x, excluded), 2) / x.shape[2]
        if torch.isnan(loud).any():
            raise ValueError("NaN cannot be quantized")
        loudness = (steps_of(loud) + EVEN).clamp(0, 15)
        x = x / _size(loudness - EVEN)
        low = self._low(x.device)
        places = (steps_of(_variance(x, excluded)).squeeze(1) - low).clamp(0, 15)
        packed: Packed = {"scale": _pack_halves(places), "gain": _pack_halves(loudness.squeeze(2))}
        return packed, x, places + low

    def decode(self, packed: Packed, out: Tensor) -> None:
        tokens, channels = out.shape[1:]
        power = _unpack_halves(dense(packed, "scale"), channels) + self._low(out.device)
        gain = _size(_unpack_halves(dense(packed, "gain"), tokens) - EVEN).unsqueeze(2)
        order = self._order(power)
        rows = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        runs = dense(packed, "codes").split([packed_rows(tokens, b) * n for b, n in self.widths], 1)
        start = 0
        for (bits, count), run in zip(self.widths, runs, strict=True):
            codes = unpack(run.unflatten(1, (-1, count)), bits, tokens)
            at = order[:, None, start : start + count].expand_as(codes)
            rows.scatter_(2, at, ranked_levels(bits).to(out.device)[codes.int()])
            start += count
        out.copy_(rows.mul_(_size(power).unsqueeze(1)).mul_(gain))

    def _low(self, device: torch.device) -> Tensor:
        return self.usual.to(device, torch.int32) - (15 - ABOVE)

    @staticmethod
    def _order(power: Tensor) -> Tensor:
        """Channels by falling scale; of equal ones the first channel first. ``[N, C]``."""
        return power.sort(stable=True, dim=-1, descending=True).indices

    def code_nbytes(self, tokens: int) -> int:
        """Bytes of the codes of a block."""
        return sum(packed_rows(tokens, bits) * count for bits, count in self.widths)

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        """All uint8: ``scale`` of the channels and ``gain`` of the tokens, two in a byte, and ``codes``, the
        runs of `widths` one after the other."""
        return {
            "scale": Field((packed_rows(channels, 4),), torch.uint8, "ranges"),
            "gain": Field((packed_rows(tokens, 4),), torch.uint8, "ranges"),
            "codes": Field((self.code_nbytes(tokens),), torch.uint8, "codes"),
        }

    def streams(self, field: str, tokens: int) -> Streams:
        return RunStreams(tuple(self.widths), tokens) if field == "codes" else Streams()

    def operand(self, tokens: int, channels: int) -> RankedOperand:
        return RankedOperand(self.usual, self.counts)

    @property
    def tables(self) -> list[Tensor]:
        return [self.usual]


FARTHEST_STEP = 200
"""How far from 0 `steps_of` goes."""
_BORDERS = torch.tensor(
    [2 ** ((i + 0.5) * 2 / STEPS) for i in range(-FARTHEST_STEP, FARTHEST_STEP)],
    dtype=torch.float64,
    device="cpu",
)


def steps_of(variance: Tensor) -> Tensor:
    """The logarithm of the root of variances, in whole steps. From a table, as `_size`."""
    borders = _BORDERS.to(variance.device, variance.dtype)
    return torch.bucketize(variance, borders, out_int32=True) - FARTHEST_STEP


@cache
def border_table() -> tuple[Tensor, int]:
    """The variances between those of whole steps (fp32), and the steps below the first."""
    return _BORDERS.float(), -FARTHEST_STEP


_FARTHEST = 400
_SIZES = torch.tensor([2 ** (k / STEPS) for k in range(-_FARTHEST, _FARTHEST + 1)], device="cpu")


def size_table() -> tuple[Tensor, int]:
    """The numbers whose logarithms are whole steps (fp32), and where the one of 0 is."""
    return _SIZES, _FARTHEST


@cache
def level_table() -> Tensor:
    """`ranked_levels` of 1 to 8 bits, one after the other."""
    return torch.cat([ranked_levels(bits) for bits in range(1, WIDEST + 1)])


@cache
def edge_table() -> Tensor:
    """What lies between the levels of `level_table`, likewise."""
    return torch.cat([edges_of(ranked_levels(bits)) for bits in range(1, WIDEST + 1)])


def _size(steps: Tensor) -> Tensor:
    """The number of which ``steps`` is the logarithm. From a table: a function may round differently on
    another device, or for another number of elements."""
    return _SIZES.to(steps.device)[steps.clamp(-_FARTHEST, _FARTHEST) + _FARTHEST]


def _variance(x: Tensor, excluded: Tensor | None) -> Tensor:
    """Mean square of every channel, ``[N, 1, C]``, of ``x`` ``[N, n, C]`` over the tokens that are not
    ``excluded``."""
    square, count = x.square(), torch.tensor(float(x.shape[1]), device=x.device)
    if excluded is not None:
        square = square.masked_fill(excluded.unsqueeze(-1), 0)
        count = (~excluded).sum(1).clamp(min=1).float().view(-1, 1, 1)
    return (_sum(square, 1) / count).clamp(min=torch.finfo(x.dtype).tiny)


def _sum(x: Tensor, dim: int) -> Tensor:
    """The sum along ``dim``, which is kept. The second half is added to the first until one is left: in an
    order that does not depend on who computes it."""
    while (count := x.shape[dim]) > 1:
        half = (count + 1) // 2
        first, second = x.split(half, dim)
        x = first.clone()
        x.narrow(dim, 0, count - half).add_(second)
    return x


def _pack_halves(values: Tensor) -> Tensor:
    """Numbers ``[N, K]`` below 16 as bytes ``[N, ceil(K / 2)]``."""
    return pack(values.to(torch.uint8).unsqueeze(-1), 4).squeeze(-1)


def _unpack_halves(packed: Tensor, count: int) -> Tensor:
    return unpack(packed.unsqueeze(-1), 4, count).squeeze(-1).int()


def side_nbytes(channels: int, tokens: int) -> int:
    """Bytes of the scales and gains of a block."""
    return packed_rows(channels, 4) + packed_rows(tokens, 4)


def allot(profiles: Sequence[Tensor], budget: int, widest: int = WIDEST) -> list[tuple[int, ...]]:
    """Bits for every rank of several layers, ``budget`` in all, so that the sum of errors is least.

    A bit goes where it takes away most (reverse water-filling, one bit at a time; errors are convex in the
    bits, so this is the best there is).

    Args:
        profiles: mean variance of each rank ``[C]``, falling, for each layer.

    Returns:
        the counts of `Ranked` for each layer.
    """
    gains = [distortion(b) - distortion(b + 1) for b in range(widest)]
    every = torch.cat([p[:, None] * p.new_tensor(gains) for p in profiles])  # [all ranks, widest]
    taken = every.new_zeros(every.numel(), dtype=torch.long)
    taken[every.flatten().topk(min(budget, every.numel())).indices] = 1
    bits = taken.view(every.shape).sum(1)
    return [
        tuple(part.bincount(minlength=widest + 1)[1:].tolist())
        for part in bits.split([len(p) for p in profiles])
    ]

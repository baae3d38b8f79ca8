"""Transform codes: every channel of a block has a scale, every token a gain, and the channels with the
largest scales get the widest codes.

``x ~ level * scale * gain``, with the levels that codes of a `trellis.Width` select. Scales and gains are
powers of ``2 ** (1 / STEPS)``, kept as 4 bits: a channel's above its lowest, the nearest to its root mean
square in the block; a token's around 1. Decoding finds the order of the scales as encoding did, so that no
widths are stored, every block takes the same bytes, and none depends on another.

The widest codes have 8 bits, and a few channels may be worth more. What the codes of such a channel leave is
then a channel of its own, its *rest*: to a decoder one like all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from .affine import FP16_MAX
from .levels import edges_of
from .operand import RankedOperand
from .pack import pack, packed_rows, unpack
from .quantizer import Field, Packed, Quantizer, dense
from .steps import STEPS, size_of, steps_of
from .streams import RunStreams, Streams
from .trellis import CIRCLE, MOST_WEIGHT, TRELLIS, WIDTHS, WINDOW, Width, end_of

ABOVE = 5
"""The place among a channel's 16 scales, from the top, of the one that is usual."""
EVEN = 8
"""The place of a gain of 1 among 16."""
REST_STEPS = 21
"""How far a channel's scale lies above that of its rest: codes of 8 bits leave a 128th."""


@dataclass(frozen=True, eq=False)
class Ranked(Quantizer):
    """Codes of 0 to 8 bits a number, by the rank of a channel's scale. Blocks are filled up to a multiple of
    `CIRCLE` tokens with hidden ones.

    Args:
        usual: the logarithm of every channel's usual scale, its root mean square in a
            calibration, in steps, int16 ``[C]``.
        counts: how many channels get codes of each of `WIDTHS`.
        rests: how many channels have a rest. They are the first ones, and their rests the last, whose numbers
            are not looked at when blocks are packed. Only codes without a trellis leave one.
        costs: the linear function, fp32 ``[C - rests]``, of a token's channels that tells the logarithm of
            what an error of one unit costs, up to a constant. The codes with a trellis are those that cost
            least. Without it errors of all tokens cost the same.

    Raises:
        ValueError: ``usual`` or ``costs`` are of another type or shape, or the counts are not those of so
            many channels.
    """

    usual: Tensor
    counts: tuple[int, ...]
    rests: int = 0
    costs: Tensor | None = None

    def __post_init__(self) -> None:
        usual, counts = self.usual, self.counts
        if usual.dtype != torch.int16 or usual.dim() != 1:
            raise ValueError(f"usual scales are int16 [C], not {usual.dtype} {list(usual.shape)}")
        if len(counts) != len(WIDTHS) or min(counts) < 0 or sum(counts) > len(usual):
            raise ValueError(f"{len(usual)} channels cannot have codes of {len(WIDTHS)} widths in {counts}")
        if not 0 <= 2 * self.rests <= len(usual):
            raise ValueError(f"{len(usual)} channels cannot be rests of {self.rests} among them")
        object.__setattr__(self, "usual", usual.contiguous())
        if self.costs is None:
            return
        if self.costs.dtype != torch.float32 or self.costs.shape != (self.measured,):
            raise ValueError(
                f"costs are fp32 [{self.measured}], not {self.costs.dtype} {list(self.costs.shape)}"
            )
        object.__setattr__(self, "costs", self.costs.contiguous())

    @property
    def channels(self) -> int:
        """``C``."""
        return len(self.usual)

    @property
    def measured(self) -> int:
        """The channels that are no rests."""
        return self.channels - self.rests

    @property
    def runs(self) -> list[tuple[Width, int]]:
        """Each width with its channels, the widest first."""
        return [(w, n) for w, n in zip(WIDTHS[::-1], self.counts[::-1], strict=True) if n]

    def encode(self, x: Tensor, excluded: Tensor | None) -> Packed:
        x, excluded = filled(self._reached(x), excluded)
        loudness = _loudness(x, excluded)
        weights = weights_of(self._costs(x, loudness), excluded)
        packed, even, power = self._measured(x, loudness, excluded)
        if excluded is not None:
            weights = weights.masked_fill(excluded, 0)
        order, sizes = self._order(power), size_of(power)
        runs, start = [even.new_empty(len(x), 0, dtype=torch.uint8)], 0
        for width, count in self.runs:
            chosen = order[:, start : start + count]
            size = sizes.gather(1, chosen)[:, None]
            of_run = chosen[:, None].expand(-1, even.shape[1], -1)
            numbers = even.gather(2, of_run) / size
            codes = width.encode(numbers, weights)
            if self.rests and not width.trellis:
                # What channels without a rest leave goes into a column that is not looked at.
                to = torch.where(of_run < self.rests, of_run + self.measured, self.channels)
                even.scatter_(2, to, (numbers - width.decode(codes)) * size)
                # There may be rests of others among these channels.
                codes = width.encode(even.gather(2, of_run) / size)
            runs.append(pack(codes, width.code).flatten(1))
            start += count
        packed["codes"] = torch.cat(runs, 1)
        return packed

    def _measured(
        self, x: Tensor, loudness: Tensor, excluded: Tensor | None
    ) -> tuple[Packed, Tensor, Tensor]:
        """The scales and gains of blocks ``[N, n, C - rests]`` as they are stored, the blocks divided by
        their gains (fp32; rests are 0, and one more column) and the logarithms of the scales ``[N, C]``."""
        x = x / size_of(loudness - EVEN)
        low = self._low(x.device)
        steps = steps_of(_variance(x, excluded)).squeeze(1)
        places = (steps - low[: self.measured]).clamp(0, 15)
        places = torch.cat([places, places[:, : self.rests]], 1)
        packed: Packed = {"scale": _pack_halves(places), "gain": _pack_halves(loudness.squeeze(2))}
        return packed, torch.nn.functional.pad(x, (0, self.rests + 1)), places + low

    def cost(self, x: Tensor, excluded: Tensor | None) -> Tensor:
        """The logarithm of what the same error in the codes of each token of blocks ``[N, n, C]`` costs, up
        to a constant, fp32 ``[N, n]``.

        Raises:
            ValueError: NaN.
        """
        x = self._reached(x)
        return self._costs(x, _loudness(x, excluded))

    def _costs(self, x: Tensor, loudness: Tensor) -> Tensor:
        found = gain_cost_table().to(x.device)[loudness.squeeze(2)]
        if self.costs is not None:
            found = found + _sum(x * self.costs.to(x.device), 2).squeeze(2)
        return found

    def _reached(self, x: Tensor) -> Tensor:
        """The channels that are no rests, fp32, as far as fp16 reaches."""
        return x[..., : self.measured].float().clamp(-FP16_MAX, FP16_MAX)

    def decode(self, packed: Packed, out: Tensor) -> None:
        tokens, channels = whole(out.shape[1]), out.shape[2]
        power = _unpack_halves(dense(packed, "scale"), channels) + self._low(out.device)
        gain = size_of(_unpack_halves(dense(packed, "gain"), tokens) - EVEN).unsqueeze(2)
        order = self._order(power)
        rows = torch.zeros(len(out), tokens, channels, dtype=torch.float32, device=out.device)
        runs = dense(packed, "codes").split([w.nbytes(tokens) * n for w, n in self.runs], 1)
        start = 0
        for (width, count), run in zip(self.runs, runs, strict=True):
            codes = unpack(run.unflatten(1, (-1, count)), width.code, tokens // width.tokens)
            levels = width.decode(codes)
            rows.scatter_(2, order[:, None, start : start + count].expand_as(levels), levels)
            start += count
        out.copy_(rows.mul_(size_of(power).unsqueeze(1)).mul_(gain)[:, : out.shape[1]])

    def _low(self, device: torch.device) -> Tensor:
        return self.usual.to(device, torch.int32) - (15 - ABOVE)

    @staticmethod
    def _order(power: Tensor) -> Tensor:
        """Channels by falling scale; of equal ones the first channel first. ``[N, C]``."""
        return power.sort(stable=True, dim=-1, descending=True).indices

    def code_nbytes(self, tokens: int) -> int:
        """Bytes of the codes of a block."""
        return whole(tokens) // CIRCLE * self._circle_nbytes

    @cached_property
    def _circle_nbytes(self) -> int:
        return sum(width.nbytes(CIRCLE) * count for width, count in self.runs)

    def fields(self, tokens: int, channels: int) -> dict[str, Field]:
        """All uint8: ``scale`` of the channels and ``gain`` of the tokens, two in a byte, and ``codes``, the
        runs of codes one after the other."""
        return {
            "scale": Field((packed_rows(channels, 4),), torch.uint8, "ranges"),
            "gain": Field((packed_rows(whole(tokens), 4),), torch.uint8, "ranges"),
            "codes": Field((self.code_nbytes(tokens),), torch.uint8, "codes"),
        }

    def streams(self, field: str, tokens: int) -> Streams:
        if field != "codes":
            return Streams()
        return RunStreams(tuple((w.code, whole(tokens) // w.tokens, n) for w, n in self.runs))

    def operand(self, tokens: int, channels: int) -> RankedOperand:
        return RankedOperand(self.usual, self.counts)

    @property
    def tables(self) -> list[Tensor]:
        return [self.usual] if self.costs is None else [self.usual, self.costs]


def whole(tokens: int) -> int:
    """The next multiple of `CIRCLE`."""
    return -(-tokens // CIRCLE) * CIRCLE


def filled(x: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Blocks ``[N, n, C]`` of `whole` tokens, and which are hidden: as before, and those that are added."""
    missing = whole(x.shape[1]) - x.shape[1]
    if not missing:
        return x, excluded
    if excluded is None:
        excluded = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    pad = torch.nn.functional.pad
    return pad(x, (0, 0, 0, missing)), pad(excluded, (0, missing), value=True)


@cache
def gain_cost_table() -> Tensor:
    """The logarithm of what the error of a token costs for each of its 16 gains, which codes are multiplied
    by: that of the gain's square (fp32)."""
    gains = torch.arange(16, dtype=torch.float64, device="cpu") - EVEN
    return (gains * (2 * math.log(2) / STEPS)).float()


EVEN_WEIGHT, POWER = 4, 0.7
"""An error counts `EVEN_WEIGHT` where it costs as much as the mean, and else in proportion to this power of
what it costs. The power 1 would be best if costs were predicted without error."""
_COST_BORDERS = torch.tensor(
    [math.log((weight + 0.5) / EVEN_WEIGHT) / POWER for weight in range(1, MOST_WEIGHT)],
    dtype=torch.float32,
    device="cpu",
)


def cost_border_table() -> Tensor:
    """The logarithms of costs, less their mean, between those that count 1, 2, ... (fp32)."""
    return _COST_BORDERS


def weights_of(costs: Tensor, excluded: Tensor | None) -> Tensor:
    """What errors of tokens count where codes are searched, uint8 ``[N, n]``, by the logarithms ``[N, n]`` of
    what they cost: `EVEN_WEIGHT` at the mean of those that are not ``excluded``."""
    counted, count = costs, torch.tensor(float(costs.shape[1]), device=costs.device)
    if excluded is not None:
        counted = costs.masked_fill(excluded, 0)
        count = (~excluded).sum(1, keepdim=True).clamp(min=1).float()
    above = costs - _sum(counted, 1) / count
    return torch.bucketize(above, _COST_BORDERS.to(costs.device)).to(torch.uint8) + 1


@cache
def level_table() -> Tensor:
    """The levels that windows of each width select, fp32 ``[widths, 2, 256]``."""
    found = torch.zeros(len(WIDTHS), 2, 2**WINDOW, dtype=torch.float32, device="cpu")
    for table, width in zip(found, WIDTHS, strict=True):
        table[: width.tokens, : 2**width.window] = width.levels.T
    return found


@cache
def search_tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What codes are found with: what lies between the levels of widths without a trellis, fp32
    ``[widths, 256]``; the levels of the others in units, int16 ``[TRELLIS, 2, 256]``; the units, and where
    numbers end, fp32."""
    edges = torch.zeros(len(WIDTHS), 2**WINDOW, dtype=torch.float32, device="cpu")
    for row, width in zip(edges[len(TRELLIS) :], WIDTHS[len(TRELLIS) :], strict=True):
        row[: 2**width.code - 1] = edges_of(width.levels[:, 0])
    units = torch.tensor([width.unit for width in TRELLIS], dtype=torch.float64, device="cpu")
    in_units = level_table()[: len(TRELLIS)].double() * units[:, None, None]
    ends = torch.tensor(
        [end_of(width.levels, width.unit) for width in TRELLIS], dtype=torch.float32, device="cpu"
    )
    return edges, in_units.round().short(), units.float(), ends


def _loudness(x: Tensor, excluded: Tensor | None) -> Tensor:
    """The place of every token's gain, int32 ``[N, n, 1]``: by its channels, each over its root mean square
    in the block.

    Raises:
        ValueError: NaN.
    """
    loud = _sum(x.square() / _variance(x, excluded), 2) / x.shape[2]
    if torch.isnan(loud).any():
        raise ValueError("NaN cannot be quantized")
    return (steps_of(loud) + EVEN).clamp(0, 15)


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
    return packed_rows(channels, 4) + packed_rows(whole(tokens), 4)


def allot(profiles: Sequence[Tensor], budget: int, narrowest: float = 0.5) -> list[tuple[int, ...]]:
    """Bits for every rank of several layers, ``budget`` in all, so that the sum of errors is least.

    Half a bit goes where it takes away most (reverse water-filling; errors are convex in the bits, so nothing
    with half a bit less costs less).

    Args:
        profiles: mean variance of each rank ``[C]``, falling, for each layer.
        narrowest: bits of the narrowest width that is given to a rank.

    Returns:
        the counts of `Ranked` for each layer.
    """
    # What each half bit takes away of the error.
    halves, gains, above = [0], [], 1.0
    for width in (width for width in WIDTHS if width.bits >= narrowest):
        halves.append(round(2 * width.bits))
        step = halves[-1] - halves[-2]
        gains += [(above - width.error) / step] * step
        above = width.error
    left_out = len(WIDTHS) + 1 - len(halves)
    every = torch.cat([p[:, None] * p.new_tensor(gains) for p in profiles])
    taken = torch.zeros_like(every, dtype=torch.long)
    # Of equal gains those of one rank come first, so that what belongs to one code is taken together.
    best = every.flatten().sort(descending=True, stable=True).indices[: 2 * budget]
    taken.view(-1)[best] = 1
    ends = torch.tensor(halves, device=taken.device)
    widths = torch.bucketize(taken.sum(1), ends, right=True) - 1
    # Where the last width is a bit above the one before, half a bit may be left: it goes where it is of use.
    spent = ends[widths]
    fits = ends[(widths + 1).clamp(max=len(halves) - 1)] - spent == 1
    if int(spent.sum()) < 2 * budget and fits.any():
        gain = every.gather(1, spent[:, None].clamp(max=len(gains) - 1)).squeeze(1)
        widths[gain.where(fits, gain.new_tensor(-1)).argmax()] += 1
    return [
        (0,) * left_out + tuple(part.bincount(minlength=len(halves))[1:].tolist())
        for part in widths.split([len(p) for p in profiles])
    ]

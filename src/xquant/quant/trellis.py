"""Trellis codes: the level of a code depends on the codes before it.

The last `WINDOW` bits of a row of codes select a level (the bit-shift trellis of QTIP, arXiv 2406.11235). So
codes of one bit have 256 levels, of which any two that may come next are far from each other. They have the
error of plain codes that are wider by a sixth to a third of a bit. A row is a circle: before its first code
comes its last. So it needs no bits but those of its codes, and reading the codes around one tells its level.

The best codes are found by dynamic programming (Viterbi), in whole numbers, so that every machine finds the
same.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .codebook import nearest
from .levels import normal_error
from .pack import packed_rows

WINDOW = 8
"""Bits that select a level."""
CIRCLE = 16
"""What the numbers of a row are a multiple of. So the codes of each width fill bytes, and a window."""
_MOST = 2**16 - 1
"""The highest cost; what costs more costs this."""
_BEYOND = 5792
"""Numbers are cut off so many units beyond the highest level. What is cut off costs a quarter of
`_DEAREST`."""
_DEAREST = 4095
"""The highest cost of a token, before its weight."""
MOST_WEIGHT = 16
"""The highest weight of a token, so that its cost stays below `_MOST`."""
_ERROR = 1024
"""Units of the root mean square of an error, where the highest level leaves room for so many."""
_HIGHEST = 2**15 - 1
"""Units of the highest level, or number, at most."""
_LEVELLED = 8
"""Codes after which the lowest cost is taken off all."""
_LEAD = 24
"""Bits before and after the first code that are searched to find where to begin."""
_ROWS, _MORE_ROWS = 128, 8192
"""Rows that are searched at a time, on a CPU and elsewhere. Each takes 17 KB at 1 bit and 128 tokens."""


@dataclass(frozen=True)
class Width:
    """Codes of ``code`` bits, one for every ``tokens`` tokens. ``window`` bits select a level: those of the
    code itself, and of codes before it."""

    code: int
    tokens: int = 1
    window: int = WINDOW

    @property
    def bits(self) -> float:
        """Bits a token."""
        return self.code / self.tokens

    @property
    def trellis(self) -> bool:
        """Whether a level depends on other codes."""
        return self.window > self.code

    @property
    def levels(self) -> Tensor:
        """The levels of every window, fp32 ``[2**window, tokens]``."""
        return _found()[name_of(self)]

    @property
    def error(self) -> float:
        """The mean squared error for standard normal numbers."""
        if self.trellis:
            return float(_found()["error"][WIDTHS.index(self)])
        return normal_error(self.levels[:, 0])

    @property
    def unit(self) -> float:
        """Of a level, in which costs are computed."""
        return unit_of(self.levels, self.error)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the packed codes of a channel."""
        return packed_rows(tokens // self.tokens, self.code)

    def encode(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The codes, uint8 ``[N, n / tokens, C]``, of numbers ``[N, n, C]``.

        Args:
            weights: of the squared error of each token, integers ``[N, n]`` up to `MOST_WEIGHT`; of weight 0
                any level will do. None: all count the same.

        Raises:
            ValueError: ``n`` is not a multiple of `CIRCLE`.
        """
        if x.shape[1] % CIRCLE:
            raise ValueError(f"a circle has a multiple of {CIRCLE} tokens, not {x.shape[1]}")
        if not self.trellis:
            return nearest(x.contiguous(), self.levels[:, 0].to(x.device))
        return search(x, weights, self, self.levels, self.unit)

    def windows(self, codes: Tensor) -> Tensor:
        """What selects the levels of codes ``[N, S, C]``, int32 ``[N, S, C]``."""
        codes = codes.int()
        found, shift = codes, self.code
        while shift < self.window:
            before = codes.roll(shift // self.code, 1)
            found = found | before << shift
            shift += self.code
        return found & (2**self.window - 1)

    def decode(self, codes: Tensor) -> Tensor:
        """The levels, fp32 ``[N, n, C]``, of codes ``[N, n / tokens, C]``."""
        return self.levels.to(codes.device)[self.windows(codes)].movedim(-1, 2).flatten(1, 2)


TRELLIS = (Width(1, 2), Width(1), Width(3, 2), Width(2), Width(5, 2), Width(3), Width(4))
WIDTHS = (*TRELLIS, *(Width(bits, 1, bits) for bits in range(5, 9)))
"""All widths, the narrowest first. Codes of 5 bits and more have one level each: a window of 8 bits would add
little to them."""


def name_of(width: Width) -> str:
    """Under which the levels of a width are stored."""
    return f"{width.code}-bits-for-{width.tokens}"


def unit_of(levels: Tensor, error: float) -> float:
    """The unit in which levels with this mean squared error are compared."""
    return min(_ERROR / error**0.5, _HIGHEST / float(levels.abs().max()))


def end_of(levels: Tensor, unit: float) -> float:
    """What numbers end at, in units: far enough beyond the levels to outvote their neighbours, and near
    enough that the farthest level costs less than `_DEAREST`."""
    return min(round(float(levels.abs().max()) * unit) + _BEYOND, _HIGHEST)


@cache
def _found() -> dict[str, Tensor]:
    """What `tools/trellis_levels.py` found."""
    return load_file(Path(__file__).with_name("trellis.safetensors"))


def search(x: Tensor, weights: Tensor | None, width: Width, levels: Tensor, unit: float) -> Tensor:
    """`Width.encode` for the given levels."""
    blocks, tokens, channels = x.shape
    way = _Search(width, (levels.double() * unit).round().int().to(x.device))
    rows = x.transpose(1, 2).reshape(-1, tokens // width.tokens, width.tokens)
    if weights is None:
        weights = x.new_ones(blocks, tokens)
    of_rows = weights.int()[:, None].expand(-1, channels, -1).reshape(rows.shape)
    size = _ROWS if x.device.type == "cpu" else _MORE_ROWS
    end = end_of(levels, unit)
    found = []
    for part, weight in zip(rows.split(size), of_rows.split(size), strict=True):
        numbers = (part.float() * unit).clamp_(-end, end).round_().int()
        found.append(way.codes(numbers, weight))
    return torch.cat(found).view(blocks, channels, -1).transpose(1, 2)


class _Search:
    """Finds the codes of rows of numbers ``[R, S, tokens]`` in units, whose errors have ``weights``.

    Args:
        levels: in units, int32 ``[2**WINDOW, tokens]``.
    """

    def __init__(self, width: Width, levels: Tensor) -> None:
        self.width, self.levels = width, levels
        self.branches = 2**width.code
        self.shared = 2 ** (WINDOW - width.code)  # windows without the code that is next

    def codes(self, rows: Tensor, weights: Tensor) -> Tensor:
        """uint8 ``[R, S]``. Where a circle begins is found by a search around its first code; then all of it
        is searched from there to there."""
        steps = rows.shape[1]
        lead = _LEAD // self.width.code
        around = torch.arange(-lead, lead, device=rows.device) % steps
        free = rows.new_zeros(len(rows), 2**WINDOW)
        cost, choices = self._forward(free, rows[:, around], weights[:, around])
        start = self._back(cost.argmin(1), choices)[1][:, lead]
        barred = torch.arange(2**WINDOW, device=rows.device) % self.shared != start[:, None]
        cost, choices = self._forward(barred.int() * _MOST, rows, weights)
        last = (cost + barred * 2 * _MOST).argmin(1)
        return self._back(last, choices)[0].to(torch.uint8)

    def _forward(self, cost: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The costs ``[R, windows]`` of the best ways to the windows after the last code, and for each code
        which of the windows that differ in their oldest bits was best before it, ``[R, shared]``."""
        choices = []
        numbers, weight = rows.movedim(0, -1)[..., None], weights.movedim(0, -1)[..., None]
        for step in range(rows.shape[1]):
            if step % _LEVELLED == 0:
                cost = cost - cost.amin(1, keepdim=True)
            # Each window can follow several. Their costs, with the number of the one before in the low bits,
            # so that the least of these numbers tells both the lowest cost and whose it is.
            past = (cost << self.width.code).view(-1, self.branches, self.shared)
            best = past[:, 0]
            for branch in range(1, self.branches):
                best = torch.minimum(best, past[:, branch] | branch)
            choices.append((best & self.branches - 1).to(torch.uint8))
            loss = [
                self._loss(*each) for each in zip(numbers[step], weight[step], self.levels.T, strict=True)
            ]
            added = sum(loss[1:], loss[0]).view(-1, self.shared, self.branches)
            cost = ((best >> self.width.code)[..., None] + added).clamp_(max=_MOST).flatten(1)
        return cost, choices

    @staticmethod
    def _loss(numbers: Tensor, weight: Tensor, levels: Tensor) -> Tensor:
        """``[R, windows]``, of numbers ``[R, 1]``."""
        off = (numbers - levels).clamp_(-(2**15), 2**15 - 1)
        return (off.square_().add_(2**14) >> 15).clamp_(max=_DEAREST).mul_(weight)

    def _back(self, last: Tensor, choices: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The codes ``[R, S]`` on the way to the ``last`` windows ``[R]``, and the bits before each that are
        shared with the window before it."""
        codes, shared = [], []
        for choice in reversed(choices):
            codes.append(last & self.branches - 1)
            known = last >> self.width.code
            shared.append(known)
            last = known + choice.gather(1, known[:, None]).squeeze(1).long() * self.shared
        return torch.stack(codes[::-1], 1), torch.stack(shared[::-1], 1)

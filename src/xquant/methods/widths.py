"""Bits of each layer's keys and values, as the option ``layers`` of a method writes them.

Runs of layers, bottom up, with a plus between them: ``2x8+10xk4v3+4``. A run is a number of layers, an x and
their bits, which are ``4``, or ``k4v3`` where those of keys and of values differ. The last run may have no
number: it is of all layers that are left.
"""

import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from typing import NamedTuple

_RUN = re.compile(r"(?:([1-9]\d{0,3})x)?(?:k(\d{1,2})v(\d{1,2})|(\d{1,2}))")


class Widths(NamedTuple):
    """Bits of a layer."""

    keys: int
    values: int

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"k{self.keys}v{self.values}"


class Runs(NamedTuple):
    """What an option says."""

    counted: tuple[Widths, ...]
    """Of the layers that are counted, bottom up."""
    rest: Widths | None
    """Of those that are left; None where all are counted."""

    def at(self, position: int) -> Widths:
        """Those of the layer at ``position``, counted from the bottom."""
        widths = self.counted[position] if position < len(self.counted) else self.rest
        assert widths is not None, position
        return widths

    def fits(self, layers: int) -> bool:
        """Whether they are of a model with so many layers."""
        left = layers - len(self.counted)
        return left == 0 or (left > 0 and self.rest is not None)


@cache
def read(written: str) -> Runs:
    """What an option says.

    Raises:
        ValueError: it is not of this form.
    """
    counted: list[Widths] = []
    rest = None
    for run in written.split("+"):
        found = _RUN.fullmatch(run)
        if found is None or rest is not None:
            raise ValueError(f"layers={written} is not written like 2x8+10xk4v3+4")
        count, *bits, both = found.groups()
        widths = Widths(*(int(each or both) for each in bits))
        if count is None:
            rest = widths
        counted += [widths] * int(count or 0)
    return Runs(tuple(counted), rest)


def write(layers: Iterable[Widths]) -> str:
    """The inverse of `read`, of all layers of a model."""
    runs = [(len([*same]), widths) for widths, same in groupby(layers)]
    return "+".join(f"{count}x{widths}" for count, widths in runs)

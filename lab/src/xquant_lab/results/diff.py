"""Compares two runs of `xquant compare`, method by method."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = (
    "method",
    "perplexity",
    "window_nll",
    "cache_bytes",
    "seconds",
    "text",
    "context",
    "windows",
)
"""What a row of a run has to hold to be compared."""
SUBJECT = ("model", "text", "text_sha256", "context", "windows")
"""Two rows that agree in these fields have the same windows, so that differences can be paired by window."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One method in two runs.

    ``difference`` is that of the mean negative log-likelihood, now less earlier, in nats a token: the
    logarithm of the perplexities' ratio, None where one is not finite. ``error`` is its standard error
    over windows, paired; None where the windows differ or are one.
    """

    earlier: Row
    now: Row
    difference: float | None
    error: float | None

    @property
    def method(self) -> str:
        """The method's spec."""
        spec: str = self.now["method"]
        return spec

    @property
    def beyond_error(self) -> bool:
        """Whether the difference is more than two standard errors."""
        if self.difference is None or self.error is None:
            return False
        return abs(self.difference) > 2 * self.error


def changes(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Change]:
    """The change of each method that is in both runs, in the order of ``rows``."""
    before = {row["method"]: row for row in earlier}
    return [_change(before[row["method"]], row) for row in rows if row["method"] in before]


def same_windows(row: Row, other: Row) -> bool:
    """Whether two rows were measured on the same windows of the same text, with the same model."""
    return all(row.get(name) == other.get(name) for name in SUBJECT)


def settings(row: Row, other: Row) -> list[tuple[str, Any, Any]]:
    """In what the measurements of two rows differ: (name, of the first, of the second)."""
    names = (*SUBJECT, "dtype", "device", "calibrations")
    found = [(name, row.get(name), other.get(name)) for name in names]
    here, there = row["environment"], other["environment"]
    found += [(name, here[name], there.get(name)) for name in here if name != "command"]
    return [(name, a, b) for name, a, b in found if a != b]


def _change(earlier: Row, now: Row) -> Change:
    before, after = earlier["window_nll"], now["window_nll"]
    # A number that was not finite is None in a file.
    if not all(nll is not None and math.isfinite(nll) for nll in (*before, *after)):
        return Change(earlier, now, None, None)
    error = None
    if same_windows(earlier, now) and 1 < len(before) == len(after):
        pairs = [new - old for old, new in zip(before, after, strict=True)]
        error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Change(earlier, now, statistics.fmean(after) - statistics.fmean(before), error)

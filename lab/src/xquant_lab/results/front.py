"""Which compressed caches are worth their size, and the sentence that says so.

Caches are judged by KL, the divergence of the next-token distribution from the full cache's. No cache can be
better than the full one by it. Perplexity can: a cache that makes a model guess otherwise may by luck guess
the text of the measurement better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xquant.spec import parse_method

LEAST_AGREEMENT = 0.5
"""Share of positions in which a cache on the front has the most likely token of the full cache, at least."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """What tells how far a cache is from the full one: a number of a row of `xquant compare`."""

    field: str
    label: str
    best: float
    """That of the full cache."""
    fine: float
    """What is lost against it from where an axis is logarithmic in the loss; it is linear below."""


KL = Measure("kl", "KL from the full cache, nats a token", 0.0, 0.002)
RATIO = Measure("ratio", "perplexity relative to the full cache", 1.0, 0.01)
"""What papers print."""


def compressed(rows: Sequence[Row], measure: Measure = KL) -> list[Row]:
    """The rows of compressed caches whose measure is finite."""
    return [
        row
        for row in rows
        if parse_method(row["method"]).name != "full"
        and row[measure.field] is not None
        and math.isfinite(row[measure.field])
        and row["cache_ratio"]
    ]


def front(rows: Sequence[Row], measure: Measure = KL) -> list[Row]:
    """The Pareto front of the compressed caches, largest first. No other cache is as small and as close to
    the full cache, and better in one of the two. A cache that changes most tokens is not on it, however
    small it is."""

    def dominates(one: Row, other: Row) -> bool:
        a, b = ((row["cache_ratio"], row[measure.field]) for row in (one, other))
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    points = [row for row in compressed(rows, measure) if _faithful(row)]
    best = [row for row in points if not any(dominates(other, row) for other in points)]
    return sorted(best, key=lambda row: -row["cache_ratio"])


def verdict(rows: Sequence[Row]) -> str:
    """A sentence on rows of `xquant compare`, with the specs in backticks."""
    every, best = compressed(rows), front(rows)
    if not every:
        return "No compressed cache with a finite KL was measured."
    if not best:
        return (
            f"No compressed cache, of {len(every)}, keeps the full cache's most likely token in half of the"
            " places."
        )
    if len(best) > 1:
        return (
            f"Of {len(every)} compressed caches, {len(best)} are on the Pareto front of size and KL, from"
            f" `{best[0]['method']}` ({_cost(best[0])}) to `{best[-1]['method']}` ({_cost(best[-1])})."
        )
    spec, faithful = best[0]["method"], sum(map(_faithful, every))
    if len(every) == 1:
        return f"`{spec}`: {_cost(best[0])}."
    whose = "is both the smallest and the closest to the full cache"
    if faithful == 1:
        whose = "alone keeps the full cache's most likely token in half of the places"
    among = f"{len(every)} compressed caches"
    if 1 < faithful < len(every):
        among += f", {faithful} of which keep the full cache's most likely token in half of the places"
    return f"Of {among}, `{spec}` {whose}: {_cost(best[0])}."


def _faithful(row: Row) -> bool:
    agreement = row.get("agreement")  # what papers print lacks it
    return agreement is None or bool(agreement >= LEAST_AGREEMENT)


def _cost(row: Row) -> str:
    same = "" if row["agreement"] is None else f", the same top token in {row['agreement']:.1%} of places"
    return f"KL {row['kl']:.4f}{same}, {row['cache_ratio']:.1%} of an fp16 cache"

"""The tables of ``xquant bench``."""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from xquant.cli.tables import print_table, say

COLUMNS = {
    "method": "left",
    "context": "right",
    "batch": "right",
    "dtype": "left",
    "kernel": "left",
    "ms a token": "right",
    "times full": "right",
    "attention, ms a layer": "right",
    "cache, MB": "right",
    "GB/s": "right",
    "of bandwidth": "right",
    "least, ms a layer": "right",
    "full at least": "right",
    "packing, us": "right",
    "codes, us": "right",
    "outliers, us": "right",
}
LARGEST_COLUMNS = {
    "method": "left",
    "context": "right",
    "batch": "right",
    "kernel": "left",
    "ms a step": "right",
    "tokens/s": "right",
    "times full": "right",
    "cache, GB": "right",
    "weights, GB": "right",
}
LESS = (
    *("full at least", "least, ms a layer", "of bandwidth", "GB/s", "dtype", "kernel"),
    *("attention, ms a layer", "weights, GB", "cache, GB", "cache, MB"),
)
"""What is left out first, of both."""


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table on standard output; columns that no row has anything for are left out."""
    cells = list(map(_cells, rows))
    filled = [any(column) for column in zip(*cells, strict=True)]
    columns = dict(compress(COLUMNS.items(), filled))
    print_table(columns, [list(compress(line, filled)) for line in cells], extra=LESS)
    _print_notes(rows)


def print_largest(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of largest batches."""
    print_table(
        LARGEST_COLUMNS,
        [
            (
                row["method"],
                str(row["context"]),
                _show(row["batch"], "d"),
                row["kernel"] or "",
                _show(row["ms_per_step"], ".1f"),
                _show(row["tokens_per_second"], ".0f"),
                _show(row["times_full"], ".2f"),
                _show(row["cache_bytes"], ".2f", 1e9),
                _show(row["weights_bytes"], ".2f", 1e9),
            )
            for row in rows
        ],
        extra=LESS,
    )
    _print_notes(rows)


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    shares = row["share_of_read_bandwidth"], row["share_of_copy_bandwidth"]
    least, parts = row.get("roofline") or {}, row.get("parts") or {}
    return (
        row["method"],
        str(row["context"]),
        str(row["batch"]),
        row["dtype"],
        row["kernel"],
        _show(row["ms_per_token"], ".4g"),
        _show(row["speedup_vs_full"], ".2f"),
        _show(row["attention_ms_per_layer"], ".4g"),
        _show(row["cache_bytes"], ".1f", 1e6),
        _show(row["gbytes_per_second"], ".1f"),
        _show(next((share for share in shares if share is not None), None), ".0%"),
        _show(least.get("ms_per_layer"), ".4g"),
        _show(least.get("full_ms_per_layer"), ".4g"),
        *(_show(parts.get(name), ".1f") for name in ("packing_us", "dense_us", "sparse_us")),
    )


def _show(number: float | None, form: str, unit: float = 1) -> str:
    if number is None:
        return ""
    return format(number / unit if unit != 1 else number, form)


def _print_notes(rows: Sequence[Mapping[str, Any]]) -> None:
    few = {}
    for row in rows:
        size = f"{row['context']} tokens" + (f", batch {row['batch']}" if row["batch"] else "")
        if why := row["failed"] or row.get("dropped"):
            say(f"{row['method']}, {size}: {why}")
        elif row.get("rounds", 0) < row.get("rounds_asked", 0):  # rows of older runs do not say
            few[size] = f"{row['rounds']} of {row['rounds_asked']} rounds"
    for size, rounds in few.items():
        say(f"{size}: {rounds}")

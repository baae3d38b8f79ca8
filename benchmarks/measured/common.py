"""What the tables share: rows of results files, and their form."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"

Row = dict[str, Any]
TABLES: dict[str, Callable[[], str]] = {}


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Make a function known as the table of its name, with hyphens."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def rows(file: str) -> list[Row]:
    found: list[Row] = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def by_method(file: str) -> dict[str, Row]:
    return {row["method"]: row for row in rows(file)}


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *body)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def code(name: str) -> str:
    """As code; the row of a `StaticKVCache` says so as text."""
    spec = name.removesuffix(" static")
    return f"`{name}`" if spec == name else f"`{spec}`, static"


def error(row: Row) -> str:
    """Standard error of the ratio to the full cache."""
    return f"{row['ratio'] * row['difference_error']:.3f}"

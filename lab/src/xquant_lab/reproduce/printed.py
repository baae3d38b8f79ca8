"""What the papers print: a TOML file of figures for each paper, read as rows that say what they hold for."""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "figures"
KEYS = ("row", "method")
"""What the first values of a row are where the file does not say: the paper's name of the method, and
the spec it is run as."""

Rows = list[dict[str, Any]]


@cache
def read_figures(paper: str) -> dict[str, Any]:
    """The file of ``paper``: its name, its arXiv number, and the blocks of each table."""
    return tomllib.loads((FOLDER / f"{paper}.toml").read_text(encoding="utf-8"))


def printed_rows(paper: str, table: str) -> Rows:
    """The rows of a table, each with its keys and ``paper``: ``{metric: {what it holds for: value}}``.

    Values of the same keys are one row, in whichever block they stand. A figure without a table has none.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for block in read_figures(paper).get(table, []):
        for keys, metric, where, value in _values(block):
            row = rows.setdefault(tuple(keys.items()), {**keys, "paper": {}})
            row["paper"].setdefault(metric, {})[where] = value
    return list(rows.values())


def add_ratios(rows: Rows) -> None:
    """Give rows with a perplexity its ratio to that of the full cache, as the paper's own values have it."""
    full = next(row["paper"]["perplexity"] for row in rows if row["method"] == "full")
    for row in rows:
        found = row["paper"]["perplexity"].items()
        row["paper"]["ratio"] = {where: round(value / full[where], 4) for where, value in found}


def _values(block: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str, float]]:
    """Every value of a block with the keys of its row and column, its metric and what it holds for."""
    names = block.get("keys", KEYS)
    columns = {k: repeat(v) if isinstance(v, str) else v for k, v in block["columns"].items()}
    for row in block["rows"]:
        keys, values = dict(zip(names, row, strict=False)), row[len(names) :]
        for value, *facts in zip(values, *columns.values(), strict=False):
            column = dict(zip(columns, facts, strict=True))
            metric, where = column.pop("metric"), column.pop("where")
            yield {**keys, **column}, metric, where, value

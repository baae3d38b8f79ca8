"""One HTML page of a comparison. Its pictures are inside it, so that it is readable without a network."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import diff
from .front import front, verdict
from .plots import COLOURS, NARROW, WIDE, as_svg, loss_figure, setting, speed_figure, timed

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = "page.html.j2"
BENCH_FIELDS = (
    *("method", "model", "measured", "context", "batch", "dtype", "kernel"),
    *("ms_per_token", "speedup_vs_full", "speedup_min_max", "cache_bytes"),
)
"""What the page needs of a row of `xquant bench`."""
TASK_FIELDS = ("method", "task", "metric", "value", "n", "stderr", "agreement")
"""What the page needs of a row of `xquant eval`."""

ON_DARK = ("#5cb0ea", "#ff8f4d", "#35c99b", "#e8a0c8", "#ffc555", "#a5dcff", "#ffffff")
"""`COLOURS` where the page is dark."""
INKS = {
    "#ffffff": "paper",
    "#1a1a1a": "ink",
    **dict.fromkeys(("#666666", "#8c8c8c", "#999999"), "muted"),
    "#e6e6e6": "thin",
    **{colour: f"series-{number}" for number, colour in enumerate(COLOURS)},
}
"""The colours of the pictures, and what the page's style calls them: it has others where it is dark."""

Row = Mapping[str, Any]
Column = tuple[Any, ...]
"""Task, metric, number of samples, and where they differ the context and the depth."""


def render_page(
    rows: Sequence[Row],
    bench: Sequence[Row] = (),
    tasks: Sequence[Row] = (),
    earlier: Sequence[Row] = (),
) -> str:
    """The page for ``rows`` of one run of `xquant compare`, as `rows.stamp` makes them.

    Args:
        bench: rows of `xquant bench`, with `BENCH_FIELDS`.
        tasks: rows of `xquant eval`, with `TASK_FIELDS`.
        earlier: rows of an earlier run to compare with, with `diff.FIELDS`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"number": _number, "breakable": _breakable, "specs": _specs}
    columns, scores = _scores(tasks)
    return jinja.get_template(TEMPLATE).render(
        rows=rows,
        first=rows[0],
        series=list(zip(COLOURS, ON_DARK, strict=True)),
        verdict=verdict(rows),
        front=front(rows),
        pareto=_pictures(loss_figure, rows),
        speed=_pictures(speed_figure, bench) if timed(bench) else {},
        speeds=_by_setting(bench),
        columns=columns,
        scores=scores,
        changes=diff.changes(rows, earlier),
        differing=diff.settings(earlier[0], rows[0]) if earlier else [],
        runs=_runs({"perplexity": rows, "speed": bench, "tasks": tasks, "earlier run": earlier}),
    )


def _pictures(draw: Callable[[Sequence[Row], float], Any], rows: Sequence[Row]) -> "dict[str, Markup]":
    """The picture for wide and for narrow screens, as SVG elements that may stand on one page."""
    from markupsafe import Markup

    found = {}
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", as_svg(draw(rows, width)))
        svg = re.sub("(?<=: )#[0-9a-f]{6}", lambda found: f"var(--{INKS[found[0]]})", svg)
        unique = f"{draw.__name__}-{name}-"
        found[name] = Markup(re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{unique}", svg))
    return found


def _by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of `xquant bench` that may be compared with each other, by what they have in common."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (setting(row), row["context"])):
        found.setdefault(f"{setting(row)}, {row['context']:,} tokens", []).append(row)
    return found


def _scores(rows: Sequence[Row]) -> tuple[list[Column], dict[str, dict[Column, Row]]]:
    """Columns of the table of tasks, and by method its cells."""
    table: dict[str, dict[Column, Row]] = {}
    for row in rows:
        column = tuple(row.get(name) for name in ("task", "metric", "n", "context", "depth"))
        table.setdefault(row["method"], {})[column] = row
    return list(dict.fromkeys(column for cells in table.values() for column in cells)), table


def _runs(parts: Mapping[str, Sequence[Row]]) -> list[tuple[str, Row]]:
    """One row of every run that the page shows, with what it measured."""
    found: dict[tuple[str, str], Row] = {}
    for name, rows in parts.items():
        for row in rows:
            found.setdefault((name, str(row["environment"])), row)
    return [(name, row) for (name, _), row in found.items()]


def _number(value: float | None, form: str) -> str:
    """``value`` in a format of Python's; a dash for what is not there or not a number."""
    if value is None or math.isnan(value):
        return "-"
    return "∞" if math.isinf(value) else format(value, form)


def _breakable(spec: str) -> "Markup":
    """A method's spec, that a line may break after a colon or comma of, not after a hyphen."""
    from markupsafe import Markup, escape

    return Markup(re.sub("[^:,]+[:,]?", r"<span>\g<0></span>", str(escape(spec))))


def _specs(sentence: str) -> "Markup":
    """A sentence with its specs, which are in backticks, as code."""
    from markupsafe import Markup, escape

    parts = sentence.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(_breakable(part)) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )

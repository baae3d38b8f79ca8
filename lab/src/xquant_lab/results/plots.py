"""Pictures of results. Rows are dictionaries as `rows.write_json` writes them."""

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from xquant.methods import METHODS
from xquant.spec import parse_method

from .front import KL, Measure, compressed, front
from .labels import write_labels

COLOURS = ("#0072b2", "#d55e00", "#008f68", "#c2649b", "#b07800", "#3d97cf", "#000000")
MARKERS = "osD^vPXp"
WIDE, NARROW = 7.4, 4.2
"""Widths in inches: of a screen or a sheet, and of a telephone."""
HEIGHT = 4.8
FINE = tuple(digit * 10.0**n for n in range(-3, 2) for digit in (1, 2, 5))
COARSE = (0.01, 0.1, *(10.0**n for n in range(16)))
"""Ticks of an axis of losses, and those where a loss is past the fine ones."""
LANE = 0.15
"""Inches of height that a row takes in the picture of speeds."""

Row = Mapping[str, Any]


def loss_figure(rows: Sequence[Row], width: float = WIDE, measure: Measure = KL) -> Any:
    """A matplotlib figure: how far caches are from the full one against the compression factor.

    Methods on the Pareto front are filled and joined by a line; the full cache is a dashed line.
    """

    def position(row: Row) -> tuple[float, float]:
        return 1 / row["cache_ratio"], row[measure.field]

    figure = new_figure(width, HEIGHT)
    axes = figure.add_subplot()
    axes.axhline(measure.best, color="0.4", linewidth=1, linestyle="--", zorder=1.5, label="full cache")
    points, best = compressed(rows, measure), front(rows, measure)
    if best:
        line = zip(*map(position, best), strict=True)
        axes.plot(*line, color="0.55", drawstyle="steps-pre", zorder=1.8, label="Pareto front")
    for index, name in enumerate(METHODS):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        own = [row for row in points if parse_method(row["method"]).name == name]
        for row in own:
            fill = colour if row in best else "white"
            place = position(row)
            axes.plot(*place, marker, color=colour, markerfacecolor=fill, markersize=6, zorder=3)
        if own:
            axes.plot([], [], marker, color=colour, markersize=6, label=name)
    axes.set_xlabel("compression factor against the fp16 cache")
    axes.set_ylabel(measure.label)
    axes.margins(0.13, 0.1)
    axes.ticklabel_format(useOffset=False)
    worst = max((row[measure.field] for row in points), default=measure.best) - measure.best
    if worst > 2 * measure.fine:
        _loss_axis(axes, measure, worst)
    axes.grid(color="0.9", linewidth=0.8)
    _plain(axes)
    figure.legend(loc="outside upper center", ncols=round(width / 1.4), frameon=False, fontsize=9)
    rest = [row for row in points if row not in best]
    write_labels(axes, [(row["method"], position(row)) for row in (*best, *rest)], len(best))
    return figure


def speed_figure(rows: Sequence[Row], width: float = WIDE) -> Any:
    """A matplotlib figure: how many times faster than the full cache each method decodes, by context.

    Rows of `xquant bench`, with a panel for each setting; bars go from the slowest round to the fastest.
    """
    panels: dict[str, list[Row]] = {}
    for row in timed(rows):
        panels.setdefault(setting(row), []).append(row)
    contexts = sorted({row["context"] for shown in panels.values() for row in shown})
    heights = [len(shown) + len({row["method"] for row in shown}) for shown in panels.values()]
    figure = new_figure(width, LANE * sum(heights) + len(panels) + 0.3)
    column = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, shown) in zip(column, panels.items(), strict=True):
        _draw_speeds(axes, shown, contexts)
        axes.set_title(name, fontsize=9, loc="left", parse_math=False)
    column[-1].set_xlabel("times as fast as the full cache")
    for context in contexts:
        column[0].plot([], [], "o", color=_shade(context, contexts), label=f"{context:,} tokens")
    figure.legend(loc="outside upper center", ncols=round(width / 1.6), frameon=False, fontsize=9)
    return figure


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows of `xquant bench` that the picture shows: all but the full cache's."""
    return [row for row in rows if row["method"] != "full"]


def setting(row: Row) -> str:
    """The setting of a row of `xquant bench`. Rows of one setting may be compared."""
    batch = f", batch {row['batch']}" if row["batch"] > 1 else ""
    return f"{row['model']}, {row['measured']}{batch}"


def as_svg(figure: Any) -> str:
    """The figure as an ``<svg>`` element, the same for the same rows."""
    import matplotlib

    file = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "xquant"}):
        figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue().decode()
    return text[text.index("<svg") :]


def as_png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches."""
    # matplotlib would tell the user that it builds a font cache.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _loss_axis(axes: Any, measure: Measure, worst: float) -> None:
    """Spread out small losses on the y axis, where the differences matter."""
    import numpy as np
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes.set_yscale(
        "function",
        functions=(
            lambda y: np.arcsinh((y - measure.best) / measure.fine),
            lambda y: measure.best + measure.fine * np.sinh(y),
        ),
    )
    ticks = [each for each in (FINE if worst < 2 * FINE[-1] else COARSE) if each >= measure.fine]
    losses = [*(-each for each in ticks if each < 1), 0, *ticks]
    low, high = axes.get_ylim()
    marks = [measure.best + loss for loss in losses]
    axes.yaxis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_speeds(axes: Any, rows: Sequence[Row], contexts: Sequence[int]) -> None:
    """A lane for each row, those of a method together, and an empty lane between methods."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.axvline(1, color="0.4", linewidth=1, linestyle="--", zorder=1.5)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lane, middles = 0, []
    for method in methods:
        own = sorted((row for row in rows if row["method"] == method), key=lambda r: r["context"])
        for y, row in enumerate(own, lane):
            shade = _shade(row["context"], contexts)
            axes.plot(row["speedup_min_max"], (y, y), color=shade, linewidth=1)
            axes.plot(row["speedup_vs_full"], y, "o", color=shade, markersize=5)
        middles.append(lane + (len(own) - 1) / 2)
        lane += len(own) + 1
    axes.set_yticks(middles, [name.replace(":", ":\n") for name in methods], fontsize=8)
    axes.set_ylim(lane - 1, -1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0) if high / low < 4 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    _plain(axes)


def _shade(context: int, contexts: Sequence[int]) -> str:
    return COLOURS[contexts.index(context) % len(COLOURS)]

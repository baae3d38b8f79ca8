"""Pictures of results. Rows are those that `xquant.evals.results` writes, as dictionaries."""

import io
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from ..spec import parse_method

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
LOG_FROM = 1.5
"""Ratio of the worst to the best perplexity from which the axis is logarithmic."""

Row = Mapping[str, Any]
Point = tuple[float, float, str]


def families(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Points (compression factor, perplexity ratio, short label) by method name, sorted.

    The full cache is the axis of the picture rather than a point of it; rows without a finite
    perplexity are left out.
    """
    found: dict[str, list[Point]] = {}
    for row in rows:
        name = parse_method(row["method"]).name
        ratio = row["ratio"]
        if name != "full" and ratio is not None and math.isfinite(ratio) and row["cache_ratio"]:
            label = row["method"].removeprefix(name).lstrip("-:") or name
            found.setdefault(name, []).append((1 / row["cache_ratio"], ratio, label))
    return {name: sorted(points) for name, points in found.items()}


def perplexity_figure(rows: Sequence[Row]) -> tuple[str, bytes]:
    """Perplexity relative to the full cache against the compression factor, as (SVG, PNG)."""
    # The note that a font cache is being built would break the silence of the command line.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, families(rows))
    svg, png = io.BytesIO(), io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "xquant"}):
        figure.savefig(svg, format="svg", metadata=nothing)
    figure.savefig(png, format="png")
    text = svg.getvalue().decode()
    return text[text.index("<svg") :], png.getvalue()


def _draw(axes: Any, lines: Mapping[str, Sequence[Point]]) -> None:
    axes.axhline(1, color="0.4", linewidth=1, linestyle="--", zorder=1.5, label="full cache")
    for i, (name, points) in enumerate(lines.items()):
        x, y, _ = zip(*points, strict=True)
        marker, colour = MARKERS[i % len(MARKERS)], COLOURS[i % len(COLOURS)]
        axes.plot(x, y, marker=marker, color=colour, linewidth=1.5, markersize=6, label=name)
    everything = [point for points in lines.values() for point in points]
    axes.set_xlabel("compression factor against the fp16 cache")
    axes.set_ylabel("perplexity relative to the full cache")
    axes.margins(0.12)
    ratios = [1.0, *(y for _, y, _ in everything)]
    if max(ratios) / min(ratios) > LOG_FROM:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, max(ratios) / min(ratios))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)
    _place_labels(axes, everything)


def _plain_ticks(axis: Any, span: float) -> None:
    """Ticks written as plain numbers, as many in a decade as the ``span`` of the values has room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    few, some, many = (1.0,), (1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0)
    subs = many if span < 12 else some if span < 1e4 else few
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _place_labels(axes: Any, points: Sequence[Point]) -> None:
    """Write each label at the first place around its point that is free of other labels and points."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    taken = [axes.get_legend().get_window_extent(renderer)]
    for x, y, _ in points:
        px, py = axes.transData.transform((x, y))
        taken.append(
            Bbox.from_extents(px - 4 * scale, py - 4 * scale, px + 4 * scale, py + 4 * scale)
        )
    around = ((0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1), (1, 0), (-1, 0))
    for x, y, label in points:
        note = axes.annotate(
            label, (x, y), (0, 0), textcoords="offset points", fontsize=8, ha="center", va="center"
        )
        note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
        half = note.get_window_extent(renderer).size / scale / 2
        for distance, (right, up) in product((6, 14, 24, 36), around):
            note.set_position((right * (half[0] + distance), up * (half[1] + distance)))
            box = note.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(note.get_window_extent(renderer))

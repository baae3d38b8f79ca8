"""Pictures of what was measured layer by layer, as matplotlib figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..results.plots import COLOURS, WIDE, new_figure

HEIGHT = 3.6

Row = Mapping[str, Any]


def by_layer(rows: Sequence[Row], metric: str, label: str, logarithmic: bool = False) -> Any:
    """``metric`` from the lowest layer to the highest, a line for each ``state``."""
    figure = new_figure(WIDE, HEIGHT)
    axes = figure.add_subplot()
    for colour, name in zip(COLOURS, dict.fromkeys(row["state"] for row in rows), strict=False):
        own = [row for row in rows if row["state"] == name]
        values = [row[metric] for row in own]
        axes.plot([row["layer"] for row in own], values, ".-", color=colour, label=name)
    if logarithmic:
        axes.set_yscale("log")
    finish(figure, "layer", label)
    return figure


def finish(figure: Any, across: str, up: str) -> None:
    """Label the axes of a figure with lines, and name the lines above it."""
    (axes,) = figure.axes
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)


def outliers(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Of `states.magnitudes`: the channels, and by layer how far the largest stands out."""
    label = "largest channel, times the median"
    return {
        "channels": channels(rows),
        "largest": by_layer(rows, "times_median", label, logarithmic=True),
    }


OUTLIERS: dict[str, Any] = {
    "keys": ("layer", "state"),
    "metrics": ("largest", "times_median"),
    "draw": outliers,
}
"""Of an experiment that returns `states.magnitudes`."""


def channels(rows: Sequence[Row]) -> Any:
    """The ``magnitudes`` of the rows that have them: layers under each other, states side by side."""
    shown = [row for row in rows if "magnitudes" in row]
    layers, states = (list(dict.fromkeys(row[key] for row in shown)) for key in ("layer", "state"))
    figure = new_figure(WIDE, 1.5 * len(layers) + 0.5)
    grid = figure.subplots(len(layers), len(states), squeeze=False)
    for row in shown:
        axes = grid[layers.index(row["layer"]), states.index(row["state"])]
        axes.fill_between(range(len(row["magnitudes"])), row["magnitudes"], color=COLOURS[0], step="mid")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
        axes.set_title(f"{row['state']}, layer {row['layer']}", fontsize=9)
    figure.supxlabel("channel", fontsize=9)
    figure.supylabel("mean magnitude", fontsize=9)
    return figure


def bars(values: Mapping[str, float], label: str) -> Any:
    """A horizontal bar for each name, the first at the top."""
    figure = new_figure(WIDE, 0.35 * len(values) + 1)
    axes = figure.add_subplot()
    axes.barh(list(values), list(values.values()), color=COLOURS[0])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure

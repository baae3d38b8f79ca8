"""Writes names beside the points of a picture, so that none covers another or a point."""

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

DISTANCES = (6, 12, 20, 30, 42, 56)
"""Points of print from a marker to its label; the nearest that is free is taken."""
DIRECTIONS = tuple(
    (math.cos(math.radians(angle)), math.sin(math.radians(angle)))
    for angle in (90, 270, 60, 120, 300, 240, 30, 150, 330, 210, 0, 180)
)
MARKER = 4
"""Points of print that a marker reaches around its centre."""
LEADER = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3}


def write_labels(axes: Any, labels: Sequence[tuple[str, tuple[float, float]]], on_front: int) -> None:
    """Write each label, a name and the point it belongs to, into axes that are otherwise finished.

    The first ``on_front`` are joined by a line of steps. They are dark, and may stand off with a line to
    their point. Others are left out where no place is free that is nearer to their point than to another.
    """
    import numpy as np
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # places hold for this layout only
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    room = axes.get_window_extent(renderer)
    points = axes.transData.transform([point for _, point in labels]) if labels else []
    taken = [Bbox([point, point]).padded(MARKER * scale) for point in points]
    for (left, low), (right, high) in pairwise(points[:on_front]):
        steps = Bbox([(left, low), (left, high)]), Bbox([(left, high), (right, high)])
        taken += [step.padded(2 * scale) for step in steps]
    for number, (name, point) in enumerate(labels):
        strong = number < on_front
        note = axes.annotate(
            name.replace(":", ":\n"),
            point,
            (0, 0),
            textcoords="offset points",
            fontsize=8,
            color="0.1" if strong else "0.4",
            ha="center",
            va="center",
            zorder=4,
            parse_math=False,
            arrowprops=LEADER if strong else None,
        )
        size = np.asarray(Text.get_window_extent(note, renderer).size)
        for distance, direction in product(DISTANCES, DIRECTIONS):
            offset = np.multiply(direction, size / 2 + distance * scale)
            box = Bbox([points[number] + offset - size / 2, points[number] + offset + size / 2])
            gaps = np.hypot(*(points - np.clip(points, box.min, box.max)).T)
            free = room.contains(*box.min) and room.contains(*box.max)
            free = free and not any(box.overlaps(other) for other in taken)
            if free and (strong or gaps.argmin() == number):
                note.set_position(offset / scale)
                taken.append(box.padded(scale))
                break
        else:
            note.remove()

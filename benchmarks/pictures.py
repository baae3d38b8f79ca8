"""Draws the pictures of README.md and docs/ from the results files.

    python benchmarks/pictures.py

Those of the front page are for light and for dark pages. Those of the papers' experiments have a white ground
for both.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from measured import beside
from measured.frontier import FEW_BITS, LEAST_PACE, bits, paces, qualities

from xquant.catalogue import RECOMMENDED
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.results.labels import write_labels
from xquant_lab.results.plots import as_svg, new_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
FILES = ("wikitext2-smollm2", "tc-wikitext2-smollm2")
LINES = {
    "int, groups of 64": ("int4-gs64", "int3-gs64"),
    "nf4": ("nf4",),
    "kivi": ("kivi-4bit", "kivi-3bit", "kivi-2bit"),
    "kvquant": ("kvquant-3bit-1%", "kvquant-2bit-1%"),
    "xquant": ("xquant-4bit", "xquant-3bit", "xquant-2bit"),
    "xquant-cl": ("xquant-cl-3bit", "xquant-cl-2bit"),
    "tc (ours)": ("tc-3bit", "tc-2bit", "tc-1.5bit"),
    "tc-cl (ours)": ("tc-cl-3bit", "tc-cl-2bit", "tc-cl-1.1bit"),
}
"""Methods with their default options, without tails and sinks: what is compared has the same tokens full."""
BESIDE: dict[str, dict[str, Any]] = {
    "nf4": {"xytext": (0, -16)},
    "kvquant": {"xytext": (-8, -8), "ha": "right"},
    "xquant": {"xytext": (-9, -4), "ha": "right"},
    "xquant-cl": {"xytext": (0, -16), "end": 0},
}
"""Where a name stands that has no room above the last point of its line."""
COLOURS = ("#8a8a8a", "#8a8a8a", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2", "#d55e00", "#009e73")
DARK, LIGHT = "#e6edf3", "#1f2328"
LEAST_BITS, LEAST_KL = 0.8, 7e-4
"""Where the axes of the front page's picture begin: below every point."""


RIVALS = {
    "q8_0": (("q8_0",), "#8a8a8a", "X"),
    "int4, groups of 64": (("int4-gs64",), "#8a8a8a", "v"),
    "q4_0": (("q4_0",), "#8a8a8a", "o"),
    "q4_0, rotated": (("q4_0:rotate=true",), "#8a8a8a", "s"),
    "nvfp4": (("nvfp4",), "#5a9e2f", "o"),
    "nvfp4, 4/6": (("nvfp4:four=true",), "#5a9e2f", "s"),
    "quarot": (("quarot-4bit", "quarot-2bit"), "#56b4e9", "o"),
    "turboquant": (("turboquant-4bit", "turboquant-3bit", "turboquant-2bit"), "#0072b2", "o"),
    "turboquant, qjl": (("turboquant-3bit:qjl=true",), "#0072b2", "s"),
    "pairs": (("pairs-4bit", "pairs-3bit", "pairs-2bit"), "#a6761d", "o"),
    "e8": (("e8-2bit",), "#a6761d", "s"),
    "kvarn": (("kvarn-k4v2", "kvarn-k2v2"), "#cc79a7", "o"),
    "kvlinc": (("kvlinc-2bit",), "#7b61c4", "s"),
    "oscar": (("oscar-4bit:key_clip=1,value_clip=1", "oscar-2bit"), "#7b61c4", "o"),
    "kivi": (("kivi-4bit", "kivi-2bit"), "#e69f00", "o"),
    "kvquant": (("kvquant-3bit-1%",), "#e7298a", "D"),
    "xquant": (("xquant-4bit",), "#1b9e77", "D"),
    "tc (ours)": (("tc-2bit",), "#d55e00", "o"),
    "tc-cl (ours)": (("tc-cl-2bit", "tc-cl-1bit"), "#009e73", "o"),
    "tc, classes (ours)": (("tc-2bit:group=256,classes=4",), "#d55e00", "s"),
    "tc-cl, classes (ours)": (
        ("tc-cl-2bit:group=256,classes=4", "tc-cl-1bit:group=256,classes=4"),
        *("#009e73", "s"),
    ),
}
"""Methods of `rivals.py` by their names in the picture, with colour and mark: those of one line differ in
their bits alone."""
RIVALS_TEXT = "WikiText-2"
RIVALS_PANELS = {"4 sinks": "from codes alone", "4 sinks, 128 recent": "in use: 128 recent tokens in full"}

FRONTIER_TEXT, FAST = "WikiText-2", "#d55e00"


def quality(ink: str) -> Any:
    """Divergence from the full cache against bits per value, both logarithmic."""
    found = {}
    for file in FILES:
        for row in json.loads((RESULTS / f"{file}.json").read_text()):
            found[row["method"]] = row
    figure = new_figure(7.6, 4.2)
    axes = figure.add_subplot()
    coloured = zip(LINES.items(), COLOURS, strict=True)
    lines = {name: (methods, colour) for (name, methods), colour in coloured}
    draw(axes, ink, found, lines, BESIDE)
    drawn = {method: found[method] for methods in LINES.values() for method in methods}
    taken = [drawn[each.spec] for each in RECOMMENDED]  # KeyError: no line has it
    x, y = [row["bits_per_value"] for row in taken], [row["kl"] for row in taken]
    axes.plot(x, y, "o", color=ink, markersize=12, markerfacecolor="none", label="recommended")
    axes.legend(frameon=False, labelcolor=ink, loc="upper right")
    axes.set_xlim(LEAST_BITS, 4.9)
    axes.set_ylim(LEAST_KL, 2.2)
    for method, row in drawn.items():
        if row["bits_per_value"] < LEAST_BITS or row["kl"] < LEAST_KL:
            raise ValueError(f"the point of {method} would be cut off")
    better = {"xytext": (0.16, 0.26), "textcoords": "axes fraction", "xycoords": "axes fraction"}
    arrow = {"arrowstyle": "->", "color": ink}
    axes.annotate("better", (0.03, 0.06), color=ink, fontsize=10, arrowprops=arrow, **better)
    return figure


def rivals(ink: str) -> Any:
    """The same of the rivals, with sinks: every token read from the store, and beside it as in use."""
    rows = json.loads((RESULTS / "rivals.json").read_text())
    figure = new_figure(11.5, 4.8)
    panels = figure.subplots(1, len(RIVALS_PANELS), sharey=True)
    for axes, (kept, title) in zip(panels, RIVALS_PANELS.items(), strict=True):
        found = {row["of"]: row for row in rows if (row["text"], row["kept"]) == (RIVALS_TEXT, kept)}
        if unknown := found.keys() - {m for methods, *_ in RIVALS.values() for m in methods}:
            raise ValueError(f"no line of the picture has {', '.join(sorted(unknown))}")
        for name, (methods, colour, mark) in RIVALS.items():
            x, y = ([found[m][of] for m in methods] for of in ("bits_per_value", "kl"))
            wide = (
                {"linewidth": 2.4, "markersize": 7} if "ours" in name else {"linewidth": 1, "markersize": 5}
            )
            axes.plot(x, y, f"{mark}-", color=colour, label=name, **wide)
        _axes(axes, ink)
        axes.set_title(title, color=ink, fontsize=10)
        axes.set_xlabel("bits per key and value element", color=ink)
        axes.set_xlim(0.5, 9.2)
    panels[1].set_ylabel("")
    right = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
    panels[1].legend(**right, frameon=False, labelcolor="linecolor", fontsize=8.5)
    return figure


def frontier(ink: str) -> Any:
    """Divergence against bits per value, and which caches are read about as fast as `kivi-4bit`."""
    pace, known = paces("32k"), qualities().items()
    points = {m: (bits(own), own[FRONTIER_TEXT]["kl"]) for m, own in known if FRONTIER_TEXT in own}
    kinds = {
        f"at least {LEAST_PACE:g} of the speed of kivi-4bit at 32K": ("o", FAST),
        "slower": ("o", "none"),
        "not timed": ("x", "none"),
    }
    fast, slow, unknown = kinds
    figure = new_figure(7.6, 4.2)
    axes = figure.add_subplot()
    _axes(axes, ink)
    axes.axvspan(0, FEW_BITS, color=ink, alpha=0.06, linewidth=0)
    for name, (marker, fill) in kinds.items():
        axes.plot([], [], marker, color=FAST, markerfacecolor=fill, markersize=8, label=name)
    for method, place in points.items():
        kind = unknown if method not in pace else fast if pace[method] >= LEAST_PACE else slow
        axes.plot(*place, kinds[kind][0], color=FAST, markerfacecolor=kinds[kind][1], markersize=8)
    axes.legend(frameon=False, labelcolor=ink, loc="lower right")
    axes.set_xlim(1.8, 4.7)
    axes.margins(y=0.2)
    write_labels(axes, [(m.partition(",datatype")[0], place) for m, place in points.items()], 0)
    for text in axes.texts:
        text.set_color(ink)
    return figure


def draw(
    axes: Any,
    ink: str,
    found: Mapping[str, Mapping[str, Any]],
    lines: Mapping[str, tuple[Sequence[str], str]],
    beside: Mapping[str, Mapping[str, Any]],
) -> None:
    """A line for each name, of the rows ``found`` of its methods, and the axes."""
    for name, (methods, colour) in lines.items():
        x = [found[m]["bits_per_value"] for m in methods]
        y = [found[m]["kl"] for m in methods]
        ours = "ours" in name
        axes.plot(x, y, "o-", color=colour, linewidth=2.4 if ours else 1.3, markersize=6 if ours else 4)
        label = {"xytext": (0, 9), "ha": "center", "end": -1} | beside.get(name, {})
        end = label.pop("end")
        axes.annotate(
            name,
            (x[end], y[end]),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            weight="bold" if ours else "normal",
            **label,
        )
    _axes(axes, ink)


def _axes(axes: Any, ink: str) -> None:
    """Bits, and divergence on a logarithmic axis, in the page's ink."""
    axes.set_yscale("log")
    axes.set_xlabel("bits per key and value element, everything counted (fp16 has 16)", color=ink)
    axes.set_ylabel("KL divergence from the full cache, nats", color=ink)
    axes.tick_params(colors=ink, which="both")
    axes.grid(color=ink, alpha=0.15, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(ink)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with matplotlib.rc_context({"savefig.transparent": True}):
        for name, ink in (("light", LIGHT), ("dark", DARK)):
            for draw_one in (quality, rivals, frontier):
                file = IMAGES / f"{draw_one.__name__}-{name}.svg"
                file.write_text(as_svg(draw_one(ink)) + "\n")
    of_papers()


def of_papers() -> None:
    """What the experiments draw of their results files, and nothing else in their folder."""
    folder = IMAGES.parent / beside.IMAGES
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for experiment in EXPERIMENTS.values():
        for file in beside.results(experiment):
            for name, figure in beside.pictures(experiment, file).items():
                (folder / beside.picture(file, name)).write_text(short(as_svg(figure)) + "\n")


def short(svg: str) -> str:
    """A picture whose paths go to hundredths of a point, and name one coordinate where the other stays: a
    third of the size where there are many steps."""

    def shorter(path: re.Match[str]) -> str:
        lines, at = [], ("", "")
        for line in path[2].split("\n"):
            command, *numbers = re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", line).split()
            x, y = numbers[-2:] or at
            if command == "L" and x == at[0]:
                lines.append(f"V{y}")
            elif command == "L" and y == at[1]:
                lines.append(f"H{x}")
            else:
                lines.append(command + " ".join(numbers))
            at = x, y
        return path[1] + "".join(lines) + path[3]

    return re.sub(r'( d=")([^"]*?)(\s*")', shorter, svg)


if __name__ == "__main__":
    main()

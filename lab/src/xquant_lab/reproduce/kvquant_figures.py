"""KVQuant's Figures 1 and 3: what each of its parts is worth, and longer and longer texts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.spec import parse_method

from ..results.plots import COLOURS, HEIGHT, MARKERS, WIDE, new_figure
from .experiment import perplexities
from .kvquant_costs import GIB
from .pictures import bars, finish
from .printed import Rows
from .setup import Setup

SIZES = {"512": 512, "128k": 2**17}
"""The lengths of Figure 1's caches."""
PARTS = (8, 4, 2, 1)
"""Into how many parts Figure 3 cuts a window."""
CALIBRATED = 2048
"""Tokens of a sample that the methods of Figure 3 are calibrated on, at most: as in the paper."""
METHODS = (
    "full",
    "kvquant-4bit-1%",
    "kvquant-3bit-1%",
    "kvquant-2bit-1%",
    "kivi-4bit",
    "kivi-2bit",
    "xquant-4bit",
    "xquant-cl-2bit",
    "tc-2bit",
    "tc-cl-2bit",
)
"""Of Figure 3: KVQuant's, then those that the paper has not."""


def figure1(setup: Setup, printed: Rows) -> Rows:
    """KVQuant's parts added one by one, each with the bytes of its cache; of the weights too."""
    rows = perplexities(setup, printed)
    methods = [row["method"] for row in rows]
    found = zip(rows, sizes(setup.model, methods), strict=True)
    return [{**row, **nbytes} for row, nbytes in found]


def sizes(model: Any, methods: Sequence[str]) -> list[dict[str, float]]:
    """GiB of the model's weights and of the methods' caches, in fp16; only its configuration counts."""
    skeleton = Skeleton(model.config, torch.float16)
    layouts = [CacheLayout(skeleton, parse_method(method)) for method in methods]
    return [
        {"weights_gib": skeleton.nbytes / GIB}
        | {f"cache_gib_{name}": layout.count(n, 1).total / GIB for name, n in SIZES.items()}
        for layout in layouts
    ]


def draw_figure1(rows: Rows) -> Mapping[str, Any]:
    """Left and right of the paper's figure, and the right with the paper's values."""
    full = next(row for row in rows if row["method"] == "full")
    nbytes = {"weights": full["weights_gib"]}
    nbytes |= {f"cache, {name.upper()} tokens": full[f"cache_gib_{name}"] for name in SIZES}
    (where,) = full["paper"]["perplexity"]
    measured = {row["row"]: row["perplexity"] for row in rows}
    printed = {row["row"]: row["paper"]["perplexity"][where] for row in rows}
    found = {
        "sizes": bars(nbytes, "GiB in fp16"),
        "parts": bars(measured, "perplexity"),
        "paper": bars(printed, f"perplexity as printed: {where}"),
    }
    for figure in found.values():
        (axes,) = figure.axes
        axes.bar_label(axes.containers[0], fmt="%.4g", padding=3, fontsize=9)
        axes.margins(x=0.12)
    return found


def figure3(setup: Setup, printed: Rows) -> Rows:
    """Perplexity with windows of an eighth, a quarter and half of ``context``, and of ``context`` tokens: of
    the same tokens each time, unless ``context`` is no multiple of 8."""
    samples = replace(setup, context=min(setup.context, CALIBRATED))
    setup.calibrations = samples.calibrated(list(map(parse_method, METHODS)))
    rows = []
    for part in PARTS:
        context, windows = setup.context // part, setup.windows * part
        found = replace(setup, context=context, windows=windows).perplexity(METHODS)
        rows += [{"method": spec, "length": context, **found[spec].to_dict()} for spec in METHODS]
    return rows


def draw_figure3(rows: Rows) -> Mapping[str, Any]:
    """A line for each method. Good ones, whose perplexities are alike, are told apart by their KL divergence
    from the full cache."""
    compressed = [row for row in rows if row["method"] != "full"]
    divergence = by_length(compressed, "kl", "KL divergence from the full cache, nats")
    (axes,) = divergence.axes
    axes.set_yscale("log")
    return {"perplexity": by_length(rows, "perplexity", "perplexity"), "kl": divergence}


def by_length(rows: Rows, metric: str, label: str) -> Any:
    """``metric`` by the length of windows."""
    figure = new_figure(WIDE, HEIGHT)
    axes = figure.add_subplot()
    for spec in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == spec]
        index = METHODS.index(spec)
        axes.plot(
            [row["length"] for row in own],
            [row[metric] for row in own],
            linestyle="-" if index < len(COLOURS) else "--",
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=spec,
        )
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    finish(figure, "tokens of a window", label)
    return figure

"""XQuant (arXiv 2508.10395): Tables 1, 2, 3, 4, B.1, B.2 and Figures 1, 3, B.2, B.3."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from xquant.methods.xquant import latent_bases
from xquant.models import AttentionView
from xquant.models.base import linear

from ..results.front import RATIO
from ..results.plots import loss_figure
from .experiment import TASKS, Experiment, perplexities, scores
from .pictures import OUTLIERS, by_layer
from .printed import Rows
from .setup import Setup
from .states import layers, magnitudes, similarity, watch

SHOWN = "Llama-2-7B, WikiText-2"
SHOWN_SIZES = "Llama-2-7B and 13B"
"""What Figure 1 shows of Table 4."""


def figure1(setup: Setup, printed: Rows) -> Rows:
    """Table 4 for one model and text, as compression factors and what they cost."""
    rows = perplexities(setup, [row for row in printed if "accumulator" not in row["method"]])
    full = rows[0]["paper"]["perplexity"][SHOWN]
    for row in rows:
        row["factor"] = 1 / row["cache_ratio"]
        row["degradation"] = row["perplexity"] - row["full_perplexity"]
        size = row["paper"]["cache_ratio"][SHOWN_SIZES]
        values = {name: row["paper"][name][SHOWN] for name in ("perplexity", "ratio")}
        values |= {"cache_ratio": size, "factor": round(1 / size, 2)}
        values |= {"degradation": round(values["perplexity"] - full, 2)}
        row["paper"] = {name: {SHOWN: value} for name, value in values.items()}
    return rows


def draw_figure1(rows: Rows) -> Mapping[str, Any]:
    """The measured points, and those of the paper."""
    printed = [
        {"method": row["method"]} | {name: value[SHOWN] for name, value in row["paper"].items()}
        for row in rows
    ]
    found = {"measured": rows, "paper": printed}
    return {name: loss_figure(each, measure=RATIO) for name, each in found.items()}


def figure3(setup: Setup, printed: Rows) -> Rows:
    """How alike X, keys before RoPE and values are from layer to layer."""
    return similarity(
        setup, lambda view, x: dict(zip(("X", "key", "value"), (x, *view.project(x)), strict=True))
    )


def draw_figure3(rows: Rows) -> Mapping[str, Any]:
    return {"cosine": by_layer(rows, "cosine", "cosine with the layer below")}


def figure_b2(setup: Setup, printed: Rows) -> Rows:
    """Where the outliers of X and of its latents are."""

    def states(view: AttentionView, x: Tensor) -> dict[str, Tensor]:
        basis, split, _, _ = view.offline("latents", lambda: latent_bases(view))
        keys, values = linear(x, basis).split(split, -1)
        return {"X": x, "X U_k": keys, "X U_v": values}

    return magnitudes(setup, states)


def table_b2(setup: Setup, printed: Rows) -> Rows:
    """Whether the outlier channel of the keys, that of the largest mean magnitude in a window, is among the
    k largest values of the first row of B_k^T: in percent of layers and windows."""
    measured: dict[int, list[int]] = defaultdict(list)

    def see(view: AttentionView, x: Tensor) -> None:
        keys = linear(x, view.key_weight)  # without a bias, of which the SVD knows nothing
        measured[view.index].append(int(keys.abs().mean(0).argmax()))

    watch(setup, see)
    predicted = {view.index: outlier_channels(view) for view in layers(setup)}
    rows = []
    for row in printed:
        first = {layer: channels[: row["k"]] for layer, channels in predicted.items()}
        hits = [found in first[layer] for layer, each in measured.items() for found in each]
        found = {"accuracy": 100 * sum(hits) / len(hits), "predicted": first, "measured": measured}
        rows.append({**row, **found})
    return rows


def outlier_channels(view: AttentionView) -> list[int]:
    """The channels of the keys, those first in which the SVD of W_k alone expects outliers (appendix B)."""
    # The first column of B_k, times its singular value.
    _, _, weight, _ = view.offline("latents", lambda: latent_bases(view))
    channels: list[int] = weight[:, 0].abs().argsort(descending=True).tolist()
    return channels


EXPERIMENTS = (
    Experiment("xquant/table1", "XQuant and KIVI*: perplexity", perplexities),
    Experiment(
        "xquant/table2",
        "XQuant and KIVI*: LongBench",
        partial(scores, metric="score", scale=100),
        **TASKS,
    ),
    Experiment(
        "xquant/table3",
        "XQuant and KIVI*: GSM8K, chain of thought",
        partial(scores, metric="exact_match,strict-match"),
        **TASKS,
    ),
    Experiment("xquant/table4", "XQuant-CL, XQuant, KVQuant and KIVI*: perplexity", perplexities),
    Experiment("xquant/tableB.1", "the first channel of X U_k in fp16: perplexity", perplexities),
    Experiment(
        "xquant/tableB.2",
        "outlier channels of the keys, predicted from the weights",
        table_b2,
        keys=("k",),
        metrics=("accuracy",),
    ),
    Experiment(
        "xquant/figure1",
        "compression and loss of perplexity of the methods of table 4",
        figure1,
        metrics=("factor", "degradation"),
        draw=draw_figure1,
        like="table4",
    ),
    Experiment(
        "xquant/figure3",
        "X, keys and values of neighbouring layers: how alike they are",
        figure3,
        keys=("layer", "state"),
        metrics=("cosine", "difference"),
        draw=draw_figure3,
    ),
    Experiment(
        "xquant/figureB.2",
        "X and its latents: where the outliers are",
        figure_b2,
        **OUTLIERS,
    ),
    Experiment(
        "xquant/figureB.3",
        "figure B.2 again, for a second model: where the outliers are",
        figure_b2,
        **OUTLIERS,
    ),
)

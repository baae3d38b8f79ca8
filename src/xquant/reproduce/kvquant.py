"""KVQuant (arXiv 2401.18079): Tables 1 to 4, 6 to 14, 17, 20, 21 and Figures 2, 4.

Tables 1 to 4 run ``kvquant`` as it is here. The ablations run it with the paper's ranges of keys
(``scales=offline``), and without a full first token (``sink=0``) where the paper's values are those without.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..analysis.memory import CacheLayout
from ..analysis.shapes import Skeleton
from ..bench.contenders import Models
from ..bench.run import bench
from ..bench.trials import Settings
from ..calibrations import Calibrations
from ..evals.passkey import DEPTHS, passkey
from ..methods import Full
from ..models import AttentionView
from ..models.base import rotate
from ..seam.hooks import attach
from ..spec import parse_method
from .experiment import TASKS, Experiment, perplexities, scores
from .pictures import by_layer, outliers
from .printed import Rows
from .setup import Setup
from .states import magnitudes, watch

SIZES = ("cache_gib", "bits")
"""How the paper prints sizes: GB of a cache, and average bits of a value."""
GIB = 2**30
"""The paper's GB."""
CONTEXTS = {"32K": 2**15, "128K": 2**17, "1M": 2**20, "10M": 10**7}
"""The paper's lengths: only 10M is a round number of thousands."""
PASSKEYS = 50
"""Prompts of a context, as in the paper."""
PERCENTILES = (50, 90, 99)
KEYS, TURNED_KEYS, VALUES = "keys before RoPE", "keys after RoPE", "values"


def add_cache_ratios(rows: Rows, *keys: str) -> None:
    """Give rows with a size its ratio to that of the full cache in the row with the same ``keys``."""

    def sizes(row: Mapping[str, Any]) -> dict[tuple[Any, ...], float]:
        same = [row[key] for key in keys]
        printed = ((name, where) for name in SIZES for where in row["paper"].get(name, ()))
        return {(*same, name, where): row["paper"][name][where] for name, where in printed}

    full = {
        place: size for row in rows if row["method"] == "full" for place, size in sizes(row).items()
    }
    for row in rows:
        ratios = {place[-1]: round(size / full[place], 4) for place, size in sizes(row).items()}
        if ratios:
            row["paper"]["cache_ratio"] = ratios


def sized(setup: Setup, printed: Rows) -> Rows:
    """Perplexities of a table that has sizes too."""
    add_cache_ratios(printed)
    return perplexities(setup, printed)


def table2(setup: Setup, printed: Rows) -> Rows:
    """The share of hidden numbers that are found, over ``limit`` prompts (50 without) of ``context`` tokens,
    as many at every depth."""
    add_cache_ratios(printed)
    methods = [parse_method(row["method"]) for row in printed]
    calibrations = setup.calibrated(methods)
    samples = max(round((setup.limit or PASSKEYS) / len(DEPTHS)), 1)
    asked = passkey(
        setup.model,
        setup.tokenizer,
        methods,
        (setup.context,),
        DEPTHS,
        samples,
        setup.progress,
        calibrations,
        setup.runs({"samples": samples}),
    )
    rows = []
    for row in printed:
        own = [depth for depth in asked if depth.method == row["method"]]
        n = sum(depth.samples for depth in own)
        success = sum(depth.found for depth in own) / n
        ratio = setup.cache_ratio(row["method"])
        rows.append({**row, "success": success, "n": n, "cache_ratio": ratio})
    return rows


def table3(setup: Setup, printed: Rows) -> Rows:
    """LongBench, with all methods on all tasks: the paper's value is not known of each."""
    known = {(row["method"], row["task"]): row for row in printed}
    methods = {row["method"]: row["row"] for row in printed}
    tasks = dict.fromkeys(row["task"] for row in printed)
    rows = [
        {"row": name, "method": method, "task": task, "paper": {"score": {}}}
        | known.get((method, task), {})
        for method, name in methods.items()
        for task in tasks
    ]
    return scores(setup, rows, metric="score", scale=100)


def table4(setup: Setup, printed: Rows) -> Rows:
    """RULER with prompts of ``context`` tokens, after which lm-eval names its metric."""
    add_cache_ratios(printed)
    return scores(setup, printed, metric=str(setup.context), scale=100)


def table6(setup: Setup, printed: Rows) -> Rows:
    """The attention of one new token over ``context`` random ones, keys and values together, in one layer.

    ``speedup`` is over the fastest setting of the full cache.
    """
    compressed = [parse_method(row["method"]) for row in printed if row["method"] != "full"]
    settings = Settings(setup.context, whole=False)
    found = bench(Models(setup.model), compressed, settings, setup.progress)
    timed = {row["method"]: row for row in found}
    full = printed[0]["paper"]["microseconds"]
    rows = []
    for row in printed:
        paper, own = row["paper"], timed[row["method"]]
        taken = paper["microseconds"].items()
        paper["speedup"] = {where: round(full[where] / value, 2) for where, value in taken}
        measured = {
            "microseconds": 1e3 * own["attention_ms_per_layer"],
            "speedup": own["speedup_vs_full"],
        }
        rows.append({**row, **measured, "dtype": own["dtype"], "kernel": own["kernel"]})
    return rows


def table7(setup: Setup, printed: Rows) -> Rows:
    """The weights in fp16, or at 2 bits an eighth of that, and the cache, by batch and context."""
    weights = Skeleton(setup.model.config, torch.float16).nbytes / GIB
    rows = memory(setup, printed, "batch", "length")
    for row in rows:
        row["weights_gib"] = weights if row["method"] == "full" else weights / 8
    return rows


def table8(setup: Setup, printed: Rows) -> Rows:
    """The cache by method and context."""
    return memory(setup, printed, "length")


def memory(setup: Setup, printed: Rows, *keys: str) -> Rows:
    """Bytes of the model's cache in fp16, as planned: only its configuration counts."""
    add_cache_ratios(printed, *keys)
    skeleton = Skeleton(setup.model.config, torch.float16)
    rows = []
    for row in printed:
        size = CONTEXTS[row["length"]], row.get("batch", 1)
        nbytes = CacheLayout(skeleton, parse_method(row["method"])).count(*size).total
        full = CacheLayout(skeleton, Full()).count(*size).total
        rows.append({**row, "cache_gib": nbytes / GIB, "cache_ratio": nbytes / full})
    return rows


def table21(setup: Setup, printed: Rows) -> Rows:
    """``perplexity`` with a calibration on the text that is given for it, and ``perplexity_generated`` with
    one on a text that the model writes.

    Raises:
        ValueError: no text to calibrate on, and no calibration.
    """
    if setup.calibration_text is None and not setup.calibrations:
        raise ValueError(
            "calibration texts are compared: give --calibration-text FILE, beside which the model writes one"
        )
    specs = [row["method"] for row in printed]
    given = setup.perplexity(specs)
    other = replace(setup, calibration_text=None, calibrations=Calibrations())
    generated = {row.method: row.perplexity for row in other.perplexity(specs).values()}
    return [
        {**row, **given[spec].to_dict(), "perplexity_generated": generated[spec]}
        for row, spec in zip(printed, specs, strict=True)
    ]


def figure2(setup: Setup, printed: Rows) -> Rows:
    """Where the outliers of keys, before and after RoPE, and of values are."""
    rope = attach(setup.model).view.rope

    def states(view: AttentionView, x: Tensor) -> dict[str, Tensor]:
        keys, values = view.project(x)
        heads = keys.view(1, len(x), view.kv_heads, view.head_size)
        turned = rotate(heads, *rope(x, torch.arange(len(x), device=x.device)[None]))
        return {KEYS: keys, TURNED_KEYS: turned.reshape_as(keys), VALUES: values}

    return magnitudes(setup, states)


def figure4(setup: Setup, printed: Rows) -> Rows:
    """Percentiles of the magnitudes of keys before RoPE and of values, over the largest of the layer."""
    found: dict[tuple[int, str], list[Tensor]] = defaultdict(list)

    def see(view: AttentionView, x: Tensor) -> None:
        for name, state in zip((KEYS, VALUES), view.project(x), strict=True):
            ordered = state.abs().flatten().sort().values
            places = [math.ceil(len(ordered) * p / 100) - 1 for p in PERCENTILES]
            found[view.index, name].append((ordered[places] / ordered[-1]).cpu())

    watch(setup, see)
    rows = []
    for (layer, name), windows in found.items():
        mean = torch.stack(windows).mean(0).tolist()
        percentiles = {f"p{p}": value for p, value in zip(PERCENTILES, mean, strict=True)}
        rows.append({"layer": layer, "state": name, **percentiles})
    return rows


def draw_figure4(rows: Rows) -> Mapping[str, Any]:
    return {f"p{p}": by_layer(rows, f"p{p}", f"{p}% of magnitudes are below") for p in PERCENTILES}


EXPERIMENTS = (
    Experiment("kvquant/table1", "KVQuant, int and nf: perplexity", sized),
    Experiment(
        "kvquant/table2",
        "KVQuant and KIVI: passkey retrieval",
        table2,
        needs="",
        metrics=("success", "cache_ratio"),
    ),
    Experiment("kvquant/table3", "KVQuant and KIVI: LongBench", table3, **TASKS),
    Experiment("kvquant/table4", "KVQuant and KIVI: RULER", table4, **TASKS),
    Experiment(
        "kvquant/table6",
        "attention of one token over 4-bit codes with 1% outliers: time",
        table6,
        needs="",
        metrics=("microseconds", "speedup"),
    ),
    Experiment(
        "kvquant/table7",
        "weights and cache by batch and context: bytes",
        table7,
        needs="",
        counts=True,
        keys=("row", "method", "batch", "length"),
        metrics=("weights_gib", "cache_gib", "cache_ratio"),
    ),
    Experiment(
        "kvquant/table8",
        "KVQuant's cache by context: bytes",
        table8,
        needs="",
        counts=True,
        keys=("row", "method", "length"),
        metrics=("cache_gib", "cache_ratio"),
    ),
    Experiment("kvquant/table9", "keys and values per token or per channel: perplexity", sized),
    Experiment("kvquant/table10", "keys before or after RoPE, per channel: perplexity", sized),
    Experiment("kvquant/table11", "levels: uniform, NormalFloat, three k-means: perplexity", sized),
    Experiment("kvquant/table12", "outliers per vector or per matrix: perplexity", sized),
    Experiment("kvquant/table13", "with and without a full first token: perplexity", perplexities),
    Experiment("kvquant/table14", "ranges of keys online or offline: perplexity", perplexities),
    Experiment("kvquant/table17", "datatypes and shares of outliers: perplexity", sized),
    Experiment("kvquant/table20", "keys before or after RoPE, per token: perplexity", perplexities),
    Experiment(
        "kvquant/table21",
        "what KVQuant is calibrated on: perplexity",
        table21,
        metrics=("perplexity", "perplexity_generated"),
    ),
    Experiment(
        "kvquant/figure2",
        "keys before and after RoPE, and values: where the outliers are",
        figure2,
        keys=("layer", "state"),
        metrics=("largest", "times_median"),
        draw=outliers,
    ),
    Experiment(
        "kvquant/figure4",
        "how much of their range the magnitudes of keys and values use",
        figure4,
        keys=("layer", "state"),
        metrics=tuple(f"p{p}" for p in PERCENTILES),
        draw=draw_figure4,
    ),
)

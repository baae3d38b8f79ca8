"""What KVQuant costs: bytes of weights and cache, and the time of attention."""

from collections.abc import Mapping
from typing import Any

import torch

from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.methods import Full
from xquant.spec import parse_method

from ..bench.contenders import Models
from ..bench.run import bench
from ..bench.trials import Settings
from .printed import Rows
from .setup import Setup

SIZES = ("cache_gib", "bits")
"""How the paper prints sizes: GB of a cache, and average bits of a value."""
GIB = 2**30
"""The paper's GB."""
CONTEXTS = {"32K": 2**15, "128K": 2**17, "1M": 2**20, "10M": 10**7}
"""The paper's lengths: only 10M is a round number of thousands."""


def add_cache_ratios(rows: Rows, *keys: str) -> None:
    """Give rows with a size its ratio to that of the full cache in the row with the same ``keys``."""

    def sizes(row: Mapping[str, Any]) -> dict[tuple[Any, ...], float]:
        same = [row[key] for key in keys]
        printed = ((name, where) for name in SIZES for where in row["paper"].get(name, ()))
        return {(*same, name, where): row["paper"][name][where] for name, where in printed}

    full = {place: size for row in rows if row["method"] == "full" for place, size in sizes(row).items()}
    for row in rows:
        ratios = {place[-1]: round(size / full[place], 4) for place, size in sizes(row).items()}
        if ratios:
            row["paper"]["cache_ratio"] = ratios


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

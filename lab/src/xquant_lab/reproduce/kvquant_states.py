"""What KVQuant's pictures show of keys and values."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xquant.models import AttentionView
from xquant.models.rotation import apply_rope
from xquant.seam.hooks import attach

from .pictures import by_layer
from .printed import Rows
from .setup import Setup
from .states import magnitudes, watch

PERCENTILES = (50, 90, 99)
KEYS, TURNED_KEYS, VALUES = "keys before RoPE", "keys after RoPE", "values"


def figure2(setup: Setup, printed: Rows) -> Rows:
    """Where the outliers of keys, before and after RoPE, and of values are."""
    rope = attach(setup.model).view.rope

    def states(view: AttentionView, x: Tensor) -> dict[str, Tensor]:
        keys, values = view.project(x)
        heads = keys.view(1, len(x), view.kv_heads, view.head_size)
        turned = apply_rope(heads, *rope(x, torch.arange(len(x), device=x.device)[None]))
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

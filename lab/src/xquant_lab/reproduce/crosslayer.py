"""Cross-layer XQuant (arXiv 2510.11236): Tables 1 to 8, Figures 2 and 3.

The paper's settings name layers of models with 32. On another model they are at the same share of its depth,
see `at_depth`. ``code_bits`` are what the paper calls the equivalent bit-width; ``bits_per_value`` has the
scales and zeros as well, which the paper leaves out.

Figures 2 and 3 are pictures without numbers; of Figure 2 the text tells what to read from it.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from xquant.cache.growing import KVCache
from xquant.compat import CACHE
from xquant.methods import CrossLayer
from xquant.past.growing_layer import CompressedLayer
from xquant.quant import Affine
from xquant.quant.quantizer import dense
from xquant.spec import parse_method

from ..pyramid.layout import layout_of
from .experiment import AVERAGE, TASKS, Experiment, scores
from .pictures import bars, by_layer
from .printed import Rows
from .setup import Setup
from .states import layers

LAYERS = 32
"""Of the paper's models."""
BOUNDS = {"crosslayer": ("kq", "vq", "km", "vm"), "asymkv": ("lk", "lv")}
"""The options that count layers."""
LEVELS = 4
"""Of 2-bit codes."""
TIMED = (
    "full",
    "kivi-2bit:tail=128,group=32,rope=post",
    "asymkv:lk=32,lv=0,rope=post",
    "crosslayer:kq=30,vq=2,km=32,vm=16,rope=post",
)
"""What Figure 3 is measured for; the paper's text does not name its bars."""
ROUNDS = 3
MEASURED = ("score", "agreement", "same_tokens", "kl", "code_bits", "bits_per_value")


def at_depth(spec: str, depth: int) -> str:
    """A method that names layers of 32, for a model of ``depth``: as far up, in whole spans.

    All layers stay all of them. On a very small model settings that differ may become the same.
    """
    method = parse_method(spec)
    span = method.span if isinstance(method, CrossLayer) else 1
    bounds = {name: getattr(method, name) for name in BOUNDS.get(method.name, ())}
    moved = {
        name: depth if bound == LAYERS else min(round(bound * depth / LAYERS / span) * span, depth)
        for name, bound in bounds.items()
        if bound is not None
    }
    return replace(method, **moved).spec


def widths(setup: Setup, spec: str) -> dict[str, float]:
    """Bits of a sealed key or value element: the code alone, and with its share of scales and zeros."""
    method = parse_method(spec)
    layout = layout_of(setup.skeleton, method)
    values = method.group * sum(2 * codec.view.kv_width for codec in layout.codecs)
    found = {"code_bits": layout.block["codes"], "bits_per_value": layout.block.total()}
    return {name: 8 * nbytes / values for name, nbytes in found.items()}


def tables(setup: Setup, printed: Rows, metric: str = "score", scale: float = 100) -> Rows:
    """`scores` of each row's method at the model's depth, with its bits; ``run_as`` is its spec there.

    Settings differ from task to task, so every task is run with its own.
    """
    depth = len(layers(setup))
    rows = []
    for task in dict.fromkeys(row["task"] for row in printed):
        asked = [row for row in printed if row["task"] == task]
        run_as = [{**row, "method": at_depth(row["method"], depth)} for row in asked]
        for row, found in zip(asked, scores(setup, run_as, metric, scale), strict=True):
            spec = found["method"]
            more = {"method": row["method"], "run_as": spec, **widths(setup, spec)}
            rows.append({**found, **more})
    return rows


def table3(setup: Setup, printed: Rows) -> Rows:
    """Each task, and the averages over them, where XQuant has a setting for each."""
    rows = tables(setup, [row for row in printed if row["task"] != AVERAGE])
    averages = []
    for row in printed:
        if row["task"] == AVERAGE:
            own = [one for one in rows if one["row"] == row["row"]]
            means = {name: fmean(one[name] for one in own) for name in MEASURED}
            averages.append({**row, **means})
    return rows + averages


def figure2(setup: Setup, printed: Rows) -> Rows:
    """How far the 2-bit codes of a layer are from those of the layer below, as KIVI stores them.

    Shares of positions by difference, of differences of at most 1, and of codes that would be the same at
    1 bit (0 and 1, 2 and 3 taken together). The last two also by chance: for layers that have nothing to do
    with each other, but each code as often.
    """
    group = min(32, setup.context)
    found: dict[tuple[int, str], Tensor] = defaultdict(
        lambda: torch.zeros(LEVELS, LEVELS, dtype=torch.float32, device="cpu")
    )
    for done, window in enumerate(setup.ids.to(setup.model.device)):
        if setup.progress is not None:
            setup.progress(done, len(setup.ids), "comparing codes")
        cache = KVCache(setup.model, f"kivi-2bit:group={group},rope=post")
        with torch.inference_mode():
            setup.model(window[None], **{CACHE: cache})
        below: dict[str, Tensor] = {}
        for layer in cache.compressed:
            own = codes(layer)
            for state, lower in below.items():
                pairs = LEVELS * lower.flatten().long() + own[state].flatten()
                counts = pairs.bincount(minlength=LEVELS**2).view(LEVELS, LEVELS).cpu()
                found[layer.codec.view.index, state] += counts
            below = own
    rows = []
    for (index, state), counts in found.items():
        joint = counts / counts.sum()
        chance = shares(torch.outer(joint.sum(1), joint.sum(0)))
        by_chance = {f"chance_{name}": chance[name] for name in ("within_one", "one_bit")}
        rows.append({"layer": index, "state": state, **shares(joint), **by_chance})
    return rows


def codes(layer: CompressedLayer) -> dict[str, Tensor]:
    """The codes of a layer's sealed keys and values, uint8 ``[N, n, C]`` of N blocks of n tokens."""
    assert layer.stream.table is not None
    found = {}
    packed = layer.stream.gather(layer.stream.table[0])
    for state, segment, fields in zip(("key", "value"), layer.stream.segments, packed, strict=True):
        assert isinstance(segment.quantizer, Affine)
        shape = layer.stream.block, segment.channels
        found[state] = segment.quantizer.unpack(dense(fields, "codes"), *shape)
    return found


def shares(joint: Tensor) -> dict[str, float]:
    """Of the shares ``[4, 4]`` of a lower layer's and a layer's codes: those of each difference."""
    levels = torch.arange(LEVELS, device="cpu")
    apart = (levels[:, None] - levels).abs()
    same = levels[:, None] // 2 == levels // 2
    found = {f"delta{d}": joint[apart == d].sum().item() for d in range(LEVELS)}
    return {
        **found,
        "within_one": joint[apart <= 1].sum().item(),
        "one_bit": joint[same].sum().item(),
    }


def draw_figure2(rows: Rows) -> Mapping[str, Any]:
    """Both shares by layer, beside what chance gives."""
    labels = {"within_one": "codes at most 1 apart", "one_bit": "codes the same at 1 bit"}
    drawn = {}
    for metric, label in labels.items():
        chance = [
            {**row, "state": f"{row['state']}, by chance", metric: row[f"chance_{metric}"]} for row in rows
        ]
        drawn[metric] = by_layer([*rows, *chance], metric, label)
    return drawn


def figure3(setup: Setup, printed: Rows) -> Rows:
    """Seconds to read prompts and write answers an eighth as long, the windows of the text as a batch.

    The full cache is transformers' own. The paper has 16 prompts of 1,024 tokens and 128 new ones:
    16 windows of 1,152.
    """
    new = max(setup.context // 9, 1)
    prompts = setup.ids[:, : setup.context - new].to(setup.model.device)
    depth = len(layers(setup))
    run_as = {spec: at_depth(spec, depth) for spec in TIMED}
    seconds: dict[str, list[float]] = {spec: [] for spec in TIMED}
    for turn in range(ROUNDS + 1):  # the first is to warm up
        for number, spec in enumerate(TIMED):
            if setup.progress is not None:
                done = turn * len(TIMED) + number
                setup.progress(done, (ROUNDS + 1) * len(TIMED), run_as[spec])
            taken = generating(setup.model, run_as[spec], prompts, new)
            if turn:
                seconds[spec].append(taken)
    best = {spec: min(taken) for spec, taken in seconds.items()}  # other work only adds
    return [
        {
            "method": spec,
            "run_as": run_as[spec],
            "seconds": best[spec],
            "times_full": best[spec] / best["full"],
            "rounds": taken,
            "batch": len(prompts),
            "prompt": prompts.shape[1],
            "new": new,
        }
        for spec, taken in seconds.items()
    ]


def generating(model: Any, spec: str, prompts: Tensor, new: int) -> float:
    """Seconds that ``new`` tokens after each of ``prompts`` ``[B, T]`` take."""
    cache = DynamicCache(config=model.config) if spec == "full" else KVCache(model, spec)
    started = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **{CACHE: cache},
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )
    if prompts.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def draw_figure3(rows: Rows) -> Mapping[str, Any]:
    """A bar for each method."""
    seconds = {parse_method(row["method"]).head: row["seconds"] for row in rows}
    return {"seconds": bars(seconds, "seconds")}


TABLES: dict[str, Any] = {**TASKS, "metrics": MEASURED}

EXPERIMENTS = (
    Experiment("crosslayer/table1", "AsymKV: 1-bit keys on MultiFieldQA-zh", tables, **TABLES),
    Experiment(
        "crosslayer/table2",
        "cross-layer XQuant, KIVI and AsymKV: TruthfulQA, BLEU",
        partial(tables, metric="bleu_max", scale=1),
        **TABLES,
    ),
    Experiment(
        "crosslayer/table3",
        "cross-layer XQuant, KIVI and AsymKV: LongBench",
        table3,
        **{**TABLES, "keys": ("row", "task")},
    ),
    Experiment("crosslayer/table4", "data-free calibration on MultiFieldQA-zh", tables, **TABLES),
    Experiment("crosslayer/table5", "ways to merge codes on MuSiQue", tables, **TABLES),
    Experiment("crosslayer/table6", "layers that share, and whose codes", tables, **TABLES),
    Experiment("crosslayer/table7", "AsymKV and XQuant at 1.5 to 1.16 bits", tables, **TABLES),
    Experiment("crosslayer/table8", "data-free calibration of KIVI and AsymKV", tables, **TABLES),
    Experiment(
        "crosslayer/figure2",
        "2-bit codes of neighbouring layers: how far they are apart",
        figure2,
        keys=("layer", "state"),
        metrics=("delta3", "within_one", "chance_within_one", "one_bit", "chance_one_bit"),
        draw=draw_figure2,
    ),
    Experiment(
        "crosslayer/figure3",
        "time to read prompts and generate",
        figure3,
        keys=("method",),
        metrics=("seconds", "times_full"),
        draw=draw_figure3,
    ),
)

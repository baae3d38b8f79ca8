"""KVQuant on models whose weights are quantized too, after SqueezeLLM."""

from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from xquant.calibration import Expected, check
from xquant.calibrations import Calibrations
from xquant.files import write_atomically
from xquant.runs import tell_unfit

from .kvquant_costs import add_cache_ratios
from .printed import Rows, add_ratios
from .setup import Setup
from .weights import (
    collect_weights,
    linear_weights,
    quantize_weights,
    weight_bits,
    with_weights,
)

WEIGHTS = {"fp16": 16, "w4-s45": 4, "w3-s45": 3}
"""Bits of the codes of what the paper calls the weights."""

Weights = dict[str, Tensor]


def table5(setup: Setup, printed: Rows) -> Rows:
    """Perplexities by weights and method, all with their ratio to fp16 weights and the full cache. Where
    weights are quantized, everything else is calibrated on the model that has them."""
    import_module("sklearn")  # a missing package is reported at once

    add_cache_ratios(printed)
    add_ratios(printed)
    by_weights: dict[str, Rows] = defaultdict(list)
    for row in printed:
        by_weights[row["weights"]].append(row)
    narrow = [WEIGHTS[name] for name in by_weights if WEIGHTS[name] < 16]
    found = dict(zip(narrow, quantized(setup, narrow), strict=True))
    measured: Rows = []
    for name, rows in by_weights.items():
        bits = WEIGHTS[name]
        measured += perplexities(setup, rows, bits, found.pop(bits, None))
    for row in measured:
        row["ratio"] = row["perplexity"] / measured[0]["perplexity"]
    return measured


def perplexities(setup: Setup, printed: Rows, bits: int, weights: Weights | None) -> Rows:
    """Those rows measured with ``weights`` of so many bits in the place of the model's own."""
    size = float(bits)
    if weights is not None:
        size = weight_bits(weights.values(), bits)
        samples, model = setup.samples, with_weights(setup.model, weights)
        setup = replace(setup, model=model, calibrations=Calibrations())
        setup.samples = samples  # what another model would write is another text
    found = setup.perplexity([row["method"] for row in printed])
    return [{**row, **found[row["method"]].to_dict(), "weight_bits": size} for row in printed]


def quantized(setup: Setup, widths: list[int]) -> list[Weights]:
    """The weights of the model's linear layers with codes of each of the ``widths``. They are kept in the
    folder to resume from."""
    weights = linear_weights(setup.model)
    expected = {n: Expected(tuple(w.shape), torch.float16) for n, w in weights.items()}
    files = [setup.file(f"weights-{bits}bit") for bits in widths]
    found = [None if file is None else _load(file, expected) for file in files]
    if None not in found:
        return [each for each in found if each is not None]
    samples, _ = setup.samples
    done = 0

    def step(what: str, total: int) -> None:
        nonlocal done
        done += 1
        setup.progress(done, total, what)

    def seen() -> None:
        step("gradients of the weights", len(samples))

    fisher = collect_weights(setup.model, samples, weights, seen)
    made = []
    for bits, file, kept in zip(widths, files, found, strict=True):
        done = 0

        def turned(what: str = f"weights at {bits} bits") -> None:
            step(what, len(weights))

        new = kept or quantize_weights(weights, fisher, bits, turned)
        if file is not None and kept is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, save(new))
        made.append(new)
    return made


def _load(file: Path, expected: dict[str, Expected]) -> Weights | None:
    """What is kept in the file, where that is what was written."""
    if not file.exists():
        return None
    try:
        found = load_file(file)
        check(found, expected)
    except (OSError, SafetensorError, ValueError, AttributeError):
        tell_unfit(file)
        return None
    return found

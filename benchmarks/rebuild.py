"""Attention over rematerialized keys and values, beside its matrix products alone.

    python benchmarks/rebuild.py --json results.json

One layer of Llama-3.1-8B's shape that decodes a token, for every method and dtype; of `xquant-cl` one that
stores deltas. ``products`` are the same multiplications by torch, alone, in the ways it has: in the model's
dtype (fp32 by MKL and by oneDNN) and, where ours is of 16-bit integers, in bf16. ``at_peak_ms`` is what
they would take at the rate that the instruction in use reaches in registers (peak.cpp, compiled and run
here; None without AVX-512). Every round times each in turn.
"""

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from xquant import parse_method
from xquant.kernels.call import AttentionCall
from xquant.models.base import linear
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import Compressed
from xquant_lab.bench.shaped import shaped_model

SHAPE = "llama-3.1-8b"
RUNS = (
    ("xquant-4bit", torch.float32),
    ("xquant-2bit", torch.float32),
    ("xquant-cl-2bit", torch.float32),
    ("xquant-cl-2bit", torch.bfloat16),
)


@click.command()
@click.option("--context", default=8192, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(context: int, rounds: int, target: str) -> None:
    peaks = instruction_peaks()
    rows = []
    for spec, dtype in RUNS:
        method = parse_method(spec)
        cache = Compressed(shaped_model(SHAPE).to(dtype), method, context, 1, None, "auto")
        top = cache.cache.compressed[-1]
        kernel = cache.cache.stack.choices[top.codec.view.index].backend
        weights = [top.codec.key_weight]
        if top.codec.synthesis is not None:
            weights.append(top.codec.synthesis)
        native = kernel.name.startswith("avx")
        instruction = "vfmadd231ps" if dtype == torch.float32 else "vdpbf16ps"
        if native:
            instruction = "vpdpwssd"
        timed = {"layer": lambda cache=cache: top_layer(cache)}
        timed |= products(context, weights, native)
        found = interleaved(timed, rounds)
        layer, alone = found.pop("layer"), dict(found)
        work = context * sum(w.numel() for w in weights)
        peak = peaks.get(instruction)
        row = {
            "method": spec,
            "dtype": str(dtype).removeprefix("torch."),
            "context": context,
            "rounds": rounds,
            "kernel": kernel.name,
            "multiplications": work,
            "layer_ms": layer,
            "products_ms": alone,
            "of_best_product": layer / min(alone.values()),
            "instruction": instruction,
            "peak_multiplications_per_second": peak,
            "at_peak_ms": work / peak * 1e3 if peak else None,
            "of_peak": layer / (work / peak * 1e3) if peak else None,
        }
        rows.append(row)
        click.echo({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    write_json(target, stamp(rows, model=SHAPE))


def top_layer(contender: Compressed) -> float:
    """Milliseconds of the topmost layer in a pass over all of them."""
    query, key, value = contender.newest()
    for layer in contender.cache.compressed:
        start = time.perf_counter()
        layer.accumulate()
        index = layer.codec.view.index
        newest = AttentionCall(query, key, value, None, query.shape[-1] ** -0.5, None)
        out = contender.cache.attend(index, newest)
        assert out is not None
        taken = time.perf_counter() - start
    contender.cache.finish()
    return taken * 1e3


def products(rows: int, weights: Sequence[Tensor], native: bool) -> dict[str, Any]:
    """The products with ``weights`` of so many rows, in the ways torch has."""
    ways: dict[str, tuple[torch.dtype, Callable[..., Tensor]]] = {"bf16": (torch.bfloat16, F.linear)}
    if weights[0].dtype == torch.float32:
        fp32 = {"fp32, MKL": (torch.float32, F.linear), "fp32, oneDNN": (torch.float32, linear)}
        ways = {**fp32, **ways} if native else fp32
    states = [torch.randn(rows, w.shape[1]) for w in weights]

    def timed(dtype: torch.dtype, product: Callable[..., Tensor]) -> Callable[[], float]:
        factors = [(s.to(dtype), w.to(dtype)) for s, w in zip(states, weights, strict=True)]

        def run() -> float:
            start = time.perf_counter()
            for state, weight in factors:
                product(state, weight)
            return (time.perf_counter() - start) * 1e3

        return run

    return {name: timed(*way) for name, way in ways.items()}


def interleaved(timed: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """The median of each, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + 1):
        for name, run in timed.items():
            times[name].append(run())
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def instruction_peaks() -> dict[str, float]:
    """Multiply-adds a second of each instruction, of all threads; nothing without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return {}
    source = Path(__file__).with_name("peak.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "peak")
        subprocess.run([compiler, "-O2", "-fopenmp", str(source), "-o", program], check=True)
        printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: float(rate) for name, rate in map(str.split, printed.splitlines())}


if __name__ == "__main__":
    main()

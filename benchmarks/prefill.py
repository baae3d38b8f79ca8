"""Time of reading a prompt beside transformers' own cache, interleaved in one run.

    python benchmarks/prefill.py --tokens 2048 --method kivi-4bit --json results.json

The model is smollm2. Every round reads the same prompt into each cache in turn, a new one each time, so that
a change of the machine's speed meets all of them; ratios are taken round by round.

    python benchmarks/prefill.py --past 16384 --tokens 512 --method kivi-4bit --json results.json

Caches then hold so many tokens of random states before, and are cropped to them after every round. The peak
of the resident set is taken of a process that does this once with one cache, the model included, unless
`--no-peak` says that it is not asked for.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from transformers import DynamicCache

from xquant import Calibration, KVCache, load_model
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import Full, fill

SPECS = ("kivi-4bit", "kivi-2bit", "xquant-4bit")
FULL = "DynamicCache"


@click.command()
@click.option("--tokens", "lengths", multiple=True, default=[512, 2048], show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--method", "specs", multiple=True, default=SPECS, show_default=True)
@click.option("--calibration", "artifacts", multiple=True, help="Of methods that need one.")
@click.option("--kernel", default="auto", show_default=True, help="'reference' seals in torch.")
@click.option("--past", default=0, show_default=True, help="Tokens that caches hold before.")
@click.option("--peak/--no-peak", default=True, show_default=True, help="With --past.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--json", "target")
@click.option("--one", hidden=True)
@torch.inference_mode()
def main(
    lengths: tuple[int, ...],
    rounds: int,
    specs: tuple[str, ...],
    artifacts: tuple[str, ...],
    kernel: str,
    past: int,
    peak: bool,
    dtype: str,
    target: str | None,
    one: str | None,
) -> None:
    model, _ = load_model("smollm2")
    model = model.to(getattr(torch, dtype))
    made = {found.method: found for found in map(Calibration.load, artifacts)}

    def maker(name: str) -> Callable[[], Any]:
        if name != FULL:
            return lambda: _compressed(model, name, made.get(name), kernel, past)
        if past:
            return lambda: Full(model, "sdpa", past, 1).cache
        return lambda: DynamicCache(config=model.config)

    if one is not None:
        _timed(model, maker(one)(), _prompt(model, lengths[0]))
        click.echo(_peak())
        return
    if target is None:
        raise click.UsageError("--json FILE is needed")
    caches = {name: maker(name) for name in (FULL, *specs)}
    held = {name: make() for name, make in caches.items()} if past else {}
    rows = []
    for length in lengths:
        ids = _prompt(model, length)
        times: dict[str, list[float]] = {name: [] for name in caches}
        for _ in range(rounds + 1):
            for name, make in caches.items():
                cache = held[name] if past else make()
                times[name].append(_timed(model, cache, ids))
                if past:
                    cache.crop(-length)
        for name, seconds in times.items():
            full = times[FULL]
            ratios = sorted(a / b for a, b in zip(seconds[1:], full[1:], strict=True))
            row = {
                "method": name,
                "tokens": length,
                "past": past,
                "rounds": rounds,
                "kernel": kernel,
                "seconds": statistics.median(seconds[1:]),
                "ratio_to_dynamic_cache": statistics.median(ratios),
                "ratio_min_max": [ratios[0], ratios[-1]],
            }
            if past and peak:
                row["peak_mb"] = _peak_of_process(name, length)
            rows.append(row)
            ratio, peak = row["ratio_to_dynamic_cache"], row.get("peak_mb", 0)
            click.echo(f"{length:6} {name:32} {row['seconds']:8.3f} s {ratio:6.2f} {peak:8.0f} MB")
    write_json(target, stamp(rows, model="smollm2", dtype=dtype))


def _compressed(model: Any, spec: str, calibration: Any, kernel: str, past: int) -> KVCache:
    cache = KVCache(model, spec, calibration=calibration, kernel=kernel)
    if past:
        fill(cache, past, 1)
    return cache


def _prompt(model: Any, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator)


def _peak() -> float:
    """Of this process, in MB. `getrusage` would count what started it, too."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def _peak_of_process(name: str, length: int) -> float:
    """Of this script with the same options and this cache alone, in MB."""
    command = [sys.executable, *sys.argv, "--one", name, "--tokens", str(length)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(run.stdout)


def _timed(model: Any, cache: Any, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

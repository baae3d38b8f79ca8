"""Time of reading a prompt beside transformers' own cache, interleaved in one run.

    python benchmarks/prefill.py --tokens 2048 --method kivi-4bit --json results.json

The model is smollm2 in fp32. Every round reads the same prompt into each cache in turn, a new one each time,
so that a change of the machine's speed meets all of them; ratios are taken round by round.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from transformers import DynamicCache

from xquant import Calibration, KVCache, load_model
from xquant.results.rows import stamp, write_json

SPECS = ("kivi-4bit", "kivi-2bit", "xquant-4bit")


@click.command()
@click.option("--tokens", "lengths", multiple=True, default=[512, 2048], show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--method", "specs", multiple=True, default=SPECS, show_default=True)
@click.option("--calibration", "artifacts", multiple=True, help="Of methods that need one.")
@click.option("--kernel", default="auto", show_default=True, help="'reference' seals in torch.")
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(
    lengths: tuple[int, ...],
    rounds: int,
    specs: tuple[str, ...],
    artifacts: tuple[str, ...],
    kernel: str,
    target: str,
) -> None:
    model, _ = load_model("smollm2")
    made = {found.method: found for found in map(Calibration.load, artifacts)}

    def compressed(spec: str) -> Callable[[], KVCache]:
        return lambda: KVCache(model, spec, calibration=made.get(spec), kernel=kernel)

    caches: dict[str, Callable[[], Any]] = {
        "DynamicCache": lambda: DynamicCache(config=model.config),
        **{spec: compressed(spec) for spec in specs},
    }
    rows = []
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        times: dict[str, list[float]] = {name: [] for name in caches}
        for _ in range(rounds + 1):
            for name, cache in caches.items():
                times[name].append(_timed(model, cache(), ids))
        for name, seconds in times.items():
            full = times["DynamicCache"]
            ratios = sorted(a / b for a, b in zip(seconds[1:], full[1:], strict=True))
            row = {
                "method": name,
                "tokens": length,
                "rounds": rounds,
                "kernel": kernel,
                "seconds": statistics.median(seconds[1:]),
                "ratio_to_dynamic_cache": statistics.median(ratios),
                "ratio_min_max": [ratios[0], ratios[-1]],
            }
            rows.append(row)
            ratio = row["ratio_to_dynamic_cache"]
            click.echo(f"{length:6} {name:32} {row['seconds']:8.3f} s {ratio:6.2f}")
    write_json(target, stamp(rows, model="smollm2", dtype="float32"))


def _timed(model: Any, cache: Any, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

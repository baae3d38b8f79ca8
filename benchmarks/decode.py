"""Time of one decoding step beside transformers' own cache, interleaved in one run.

    python benchmarks/decode.py --context 2048 --method xquant-4bit --json results.json

The model is smollm2 in fp32. Every round decodes one token with each cache in turn, so that a change
of the machine's speed meets all of them; ratios are taken round by round.
"""

import statistics
import time
from typing import Any

import click
import torch
from transformers import DynamicCache

from xquant import Calibration, KVCache, load_model
from xquant.evals.results import stamp, write_json


@click.command()
@click.option("--context", default=2048, show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--method", "specs", multiple=True, default=["xquant-4bit"], show_default=True)
@click.option("--calibration", "artifacts", multiple=True, help="Of methods that need one.")
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(
    context: int, rounds: int, specs: tuple[str, ...], artifacts: tuple[str, ...], target: str
) -> None:
    model, _ = load_model("smollm2")
    vocabulary = model.config.vocab_size
    caches: dict[str, Any] = {"DynamicCache": DynamicCache(config=model.config)}
    made = {found.method: found for found in map(Calibration.load, artifacts)}
    caches |= {spec: KVCache(model, spec, calibration=made.get(spec)) for spec in specs}
    ids = torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(0))
    prefill = {name: _timed(model, cache, ids) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(rounds + 1):
        for name, cache in caches.items():
            times[name].append(_timed(model, cache, ids[:, :1]))
    rows = []
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds[1:], times["DynamicCache"][1:], strict=True))
        row = {
            "method": name,
            "context": context,
            "rounds": rounds,
            "ms_per_token": statistics.median(seconds[1:]) * 1e3,
            "ratio_to_dynamic_cache": statistics.median(ratios),
            "ratio_min_max": [ratios[0], ratios[-1]],
            "prefill_ratio": prefill[name] / prefill["DynamicCache"],
        }
        rows.append(row)
        click.echo(f"{name:32} {row['ms_per_token']:8.1f} ms {row['ratio_to_dynamic_cache']:6.2f}")
    write_json(target, stamp(rows, model="smollm2", dtype="float32"))


def _timed(model: Any, cache: Any, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

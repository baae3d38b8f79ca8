"""Saving a long prompt's cache and loading it, beside reading the prompt again.

    python benchmarks/saved.py --json results.json

A round reads the prompt with tc-cl-2bit in chunks, saves the cache, loads the file, converts what was loaded
to the method to generate with, and saves and loads that. The file is in the system's page cache when it is
read. Bytes are beside what is resident in the cache; the tables of a calibration are not in the file, and not
counted.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from xquant import Calibration, KVCache, calibrate, load_model
from xquant.cli.prompt import CHUNK, fill
from xquant.progress import silent
from xquant.results.rows import stamp, write_json
from xquant.text import cut_windows, read_text, text_name

LONG, FAST = "tc-cl-2bit", "kivi-4bit"
CALIBRATED_ON = 256, 16
"""Tokens of a sample and samples: what the file's size and the times ask for, not the best quality."""


@click.command()
@click.option("--text", default="help-topics", show_default=True)
@click.option("--tokens", default=6000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--calibration", help="An artifact; without one it is made of the text.")
@click.option("--json", "target", required=True)
def main(text: str, tokens: int, rounds: int, calibration: str | None, target: str) -> None:
    model, tokenizer = load_model("smollm2")
    words = read_text(text)
    if calibration is None:
        made = calibrate(model, tokenizer, LONG, words, *CALIBRATED_ON, name=text_name(text))
    else:
        made = Calibration.load(calibration)
    ids = cut_windows(model, tokenizer, words, tokens, 1)
    taken: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, dict[str, Any]] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        taken[what].append(time.perf_counter() - started)
        return result

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache"
        for number in range(rounds):
            cache = KVCache(model, LONG, calibration=made)
            timed("prefill", lambda held=cache: fill(held, ids, silent))
            timed(f"save {LONG}", lambda held=cache: held.save(file, ids))
            sizes[LONG] = _sizes(cache, file)
            loaded = timed(f"load {LONG}", lambda: KVCache.load(model, file, made))
            _compare(model, cache, loaded)
            fast = timed("convert", lambda held=loaded: held.converted(FAST))
            timed(f"save {FAST}", lambda held=fast: held.save(file, ids))
            sizes[FAST] = _sizes(fast, file)
            timed(f"load {FAST}", lambda: KVCache.load(model, file))
            click.echo(f"round {number + 1}: prefill {taken['prefill'][-1]:.1f} s")
    rows = []
    for spec in (LONG, FAST):
        ready = taken[f"load {spec}"]
        if spec == LONG:
            ready = [sum(both) for both in zip(ready, taken["convert"], strict=True)]
        usual = statistics.median(ready)
        row = {
            "method": spec,
            "tokens": tokens,
            **sizes[spec],
            "prefill_seconds": taken["prefill"],
            "save_seconds": taken[f"save {spec}"],
            "load_seconds": taken[f"load {spec}"],
            "convert_seconds": taken["convert"] if spec == LONG else None,
            "ready_seconds": ready,
            "times_faster": statistics.median(taken["prefill"]) / usual,
        }
        rows.append(row)
        click.echo(
            f"{spec:12} file {row['file_over_cache'] - 1:+.2%} of the cache,"
            f" {row['file_over_fp16']:.3f} of fp16;"
            f" saved in {statistics.median(row['save_seconds']):.2f} s, ready to generate with {FAST} in"
            f" {usual:.2f} s, {row['times_faster']:.0f} times faster than the prompt is read"
        )
    subject = {"text": text_name(text), "chunk": CHUNK, "rounds": rounds, "calibration": made.text}
    write_json(target, stamp(rows, model="smollm2", dtype="float32", **subject))


def _sizes(cache: KVCache, file: Path) -> dict[str, Any]:
    report, size = cache.report(), file.stat().st_size
    held = report.cache_bytes - report.table_bytes
    return {
        "file_bytes": size,
        "cache_bytes": held,
        "full_cache_bytes": report.full_cache_bytes,
        "file_over_cache": size / held,
        "file_over_fp16": size / report.full_cache_bytes,
    }


@torch.inference_mode()
def _compare(model: Any, cache: KVCache, loaded: KVCache) -> None:
    """Raise AssertionError unless both caches give the same logits."""
    ids = torch.full((1, 1), 7)
    logits = [model(ids, past_key_values=held).logits for held in (cache, loaded)]
    assert torch.equal(*logits)
    for held in (cache, loaded):
        held.crop(-1)


if __name__ == "__main__":
    main()

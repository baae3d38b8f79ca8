"""What entropy coding takes off a saved cache, by method, and what it costs on one core.

    python benchmarks/entropy.py --json results.json

Each cache of the same tokens is saved and loaded again with and without it, by turns, in one
thread. The files are in the system's page cache. Rates are those of the coder alone, by the bytes
of the plain file; the seconds of whole saves and loads, with digests, stand in the results, too.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from xquant import KVCache, calibrate, load_model, parse_method
from xquant.cli.prompt import fill
from xquant.progress import silent
from xquant.results import stamp, write_json
from xquant.saved import entropy
from xquant.text import cut_windows, read_text, text_name

METHODS = (
    *("tc-cl-1bit", "tc-cl-2bit", "tc-cl-3bit", "tc-2bit"),
    *("kivi-2bit", "kivi-4bit", "xquant-2bit", "kvquant-2bit-1%", "full"),
)
CALIBRATED_ON = 256, 16
"""Tokens of a sample and samples: what bytes and times ask for, not the best quality."""


@click.command()
@click.option("--text", default="help-topics", show_default=True)
@click.option("--tokens", default=6000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), multiple=True)
@click.option("--json", "target", required=True)
def main(text: str, tokens: int, rounds: int, dtype: tuple[str, ...], target: str) -> None:
    words, rows, made = read_text(text), list[dict[str, Any]](), dict[str, Any]()
    for kind in dtype or ("float32", "bfloat16"):
        model, tokenizer = load_model("smollm2", getattr(torch, kind))
        ids = cut_windows(model, tokenizer, words, tokens, 1)
        for spec in METHODS:
            method = parse_method(spec)
            kept = method.calibrated_as if method.needs_calibration else ""
            if kept and kept not in made:
                made[kept] = calibrate(model, tokenizer, spec, words, *CALIBRATED_ON, name=text_name(text))
            cache = KVCache(model, spec, calibration=made.get(kept))
            fill(cache, ids, silent)
            row = {"method": spec, "dtype": kind, **measured(cache, made.get(kept), rounds)}
            rows.append(row)
            click.echo(
                f"{spec:16} {kind:9} {row['plain_bytes'] / 1e6:7.1f} MB, -{row['saved']:.1%}; coded at"
                f" {row['code_rate']:.0f} and decoded at {row['decode_rate']:.0f} MB/s"
            )
    subject = {"text": text_name(text), "tokens": tokens, "rounds": rounds, "threads": 1}
    write_json(target, stamp(rows, model="smollm2", **subject))


def measured(cache: KVCache, calibration: Any, rounds: int) -> dict[str, Any]:
    """Bytes of both files, and the seconds of each round."""
    model, threads = cache.attachment.view.model, torch.get_num_threads()
    taken: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, int] = {}
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(rounds):
                for pack in (None, "entropy"):
                    name = pack or "plain"
                    file = Path(folder) / name
                    with coding() as spent:
                        started = time.perf_counter()
                        cache.save(file, pack=pack)
                        saved = time.perf_counter()
                        other = KVCache.load(model, file, calibration)
                        loaded = time.perf_counter()
                    taken[f"{name}_save_seconds"].append(saved - started)
                    taken[f"{name}_load_seconds"].append(loaded - saved)
                    if pack:
                        taken["code_seconds"].append(spent["code"])
                        taken["decode_seconds"].append(spent["decode"])
                    sizes[f"{name}_bytes"] = file.stat().st_size
                    assert other.nbytes == cache.nbytes
    finally:
        torch.set_num_threads(threads)
    usual = {name: statistics.median(every) for name, every in taken.items()}
    return {
        **sizes,
        **taken,
        "saved": 1 - sizes["entropy_bytes"] / sizes["plain_bytes"],
        "code_rate": sizes["plain_bytes"] / 1e6 / usual["code_seconds"],
        "decode_rate": sizes["plain_bytes"] / 1e6 / usual["decode_seconds"],
    }


@contextmanager
def coding() -> Iterator[dict[str, float]]:
    """The seconds that the coder takes in this block, each way."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            started = time.perf_counter()
            found = function(*given)
            spent[name] += time.perf_counter() - started
            return found

        return run

    own = {name: getattr(entropy, name) for name in ("code", "decode")}
    for name, function in own.items():
        setattr(entropy, name, timed(name, function))
    try:
        yield spent
    finally:
        for name, function in own.items():
            setattr(entropy, name, function)


if __name__ == "__main__":
    main()

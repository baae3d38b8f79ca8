"""Saving a long prompt's cache and loading it, beside reading the prompt again.

    python benchmarks/saved.py --json results.json

A round reads the prompt with tc-cl-2bit in chunks, and then keeps the cache in each way: as a file,
as a file that is entropy-coded, in a PrefixStore, and converted to the method to generate with.
Each is loaded again and made ready to generate: converted, and what a store does not hold is read.
Files are in the system's page cache when they are read. Bytes are beside what is resident in the
cache; the tables of a calibration are not in the file, and not counted.
"""

import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from xquant import Calibration, KVCache, PrefixStore, calibrate, load_model
from xquant.cli.prompt import CHUNK, fill
from xquant.progress import silent
from xquant.results import stamp, write_json
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
    prefill: list[float] = []
    ways: dict[tuple[str, str], _Way] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            cache = KVCache(model, LONG, calibration=made)
            prefill.append(_seconds(lambda held=cache: fill(held, ids, silent)))
            fast = cache.converted(FAST)
            for way in (
                _File(LONG, None, Path(folder), cache, made),
                _File(LONG, "entropy", Path(folder), cache, made),
                _Prefixes(LONG, Path(folder) / str(number), cache, made),
                _File(FAST, None, Path(folder), fast, None),
            ):
                ways.setdefault((way.method, way.kept), way).measure(way, ids)
            click.echo(f"round {number + 1}: prefill {prefill[-1]:.1f} s")
    rows = []
    for way in ways.values():
        usual = statistics.median(way.ready)
        row = {
            "method": way.method,
            "kept": way.kept,
            "tokens": tokens,
            **way.sizes,
            "prefill_seconds": prefill,
            "save_seconds": way.save,
            "ready_seconds": way.ready,
            "times_faster": statistics.median(prefill) / usual,
        }
        rows.append(row)
        click.echo(
            f"{way.method:12} {way.kept:14} {row['file_over_cache'] - 1:+.2%} of the cache,"
            f" {row['file_over_fp16']:.3f} of fp16; saved in {statistics.median(way.save):.2f} s, ready to"
            f" generate with {FAST} in {usual:.2f} s, {row['times_faster']:.0f} times faster than the prompt"
            " is read"
        )
    subject = {"text": text_name(text), "chunk": CHUNK, "rounds": rounds, "calibration": made.text}
    write_json(target, stamp(rows, model="smollm2", dtype="float32", **subject))


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class _Way(ABC):
    """A way of keeping one cache, and what it took in each round."""

    kept: str

    def __init__(self, method: str, cache: KVCache, calibration: Calibration | None) -> None:
        self.method, self.cache, self.calibration = method, cache, calibration
        self.model = cache.attachment.view.model
        self.save: list[float] = []
        self.ready: list[float] = []
        self.sizes: dict[str, Any] = {}

    @abstractmethod
    def keep(self, ids: Tensor) -> None:
        """Write the cache."""

    @abstractmethod
    def back(self, ids: Tensor, method: str) -> KVCache:
        """What was written, as a cache of ``method``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """That were written."""

    def measure(self, way: "_Way", ids: Tensor) -> None:
        """A round of ``way``, which is of the same kind."""
        self.save.append(_seconds(lambda: way.keep(ids)))
        loaded = way.back(ids, way.method)
        held, tokens = loaded.report(), loaded.get_seq_length()
        resident = held.cache_bytes - held.table_bytes
        self.sizes = {
            "file_bytes": way.nbytes,
            "cache_bytes": resident,
            "full_cache_bytes": held.full_cache_bytes,
            "held_tokens": tokens,
            "file_over_cache": way.nbytes / resident,
            "file_over_fp16": way.nbytes / held.full_cache_bytes,
        }
        if tokens == ids.shape[1]:
            _compare(way.model, way.cache, loaded)

        def make_ready() -> None:
            ready = way.back(ids, FAST)
            if tokens < ids.shape[1]:
                fill(ready, ids[:, tokens:], silent)

        self.ready.append(_seconds(make_ready))


class _File(_Way):
    def __init__(
        self,
        method: str,
        pack: str | None,
        folder: Path,
        cache: KVCache,
        calibration: Calibration | None,
    ) -> None:
        super().__init__(method, cache, calibration)
        self.pack, self.kept = pack, pack or "file"
        self.file = folder / "cache"

    def keep(self, ids: Tensor) -> None:
        self.cache.save(self.file, ids, self.pack)

    def back(self, ids: Tensor, method: str) -> KVCache:
        loaded = KVCache.load(self.model, self.file, self.calibration)
        return loaded if method == self.method else loaded.converted(method)

    @property
    def nbytes(self) -> int:
        return self.file.stat().st_size


class _Prefixes(_Way):
    kept = "PrefixStore"

    def __init__(self, method: str, folder: Path, cache: KVCache, calibration: Calibration) -> None:
        super().__init__(method, cache, calibration)
        self.store = PrefixStore(folder, self.model, method, calibration=calibration)

    def keep(self, ids: Tensor) -> None:
        self.store.put(self.cache, ids)

    def back(self, ids: Tensor, method: str) -> KVCache:
        found = self.store.get(ids, method)
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        return self.store.nbytes


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

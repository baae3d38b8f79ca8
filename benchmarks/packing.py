"""Tokens a second that are packed and unpacked for storage, on one core, on each path to it.

    python benchmarks/packing.py --json results.json

The model is smollm2. Of a prompt that the full cache has read, the paths are: a cache that is converted and
converted back; a PrefixStore that is put the full cache and gives it back, its files written and read; and
chunks of 256 tokens as LMCache's serde packs them, whose blocks are also those of vLLM's connector.
Calibrations are small: their quality does not matter to the time. Times are medians of rounds in which all
paths take turns.
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
from torch import Tensor

from xquant import Calibration, KVCache, PrefixStore, calibrate, load_model, parse_method
from xquant.cli.prompt import fill
from xquant.progress import silent
from xquant.results import stamp, write_json
from xquant.serve.build import Model
from xquant.serve.chunk import ChunkCoder
from xquant.serve.fit import Wanted
from xquant.text import cut_windows, read_text, text_name

METHODS = "tc-2bit", "tc-cl-2bit", "kivi-4bit"
CHUNK = 256
Times = dict[tuple[str, str], list[float]]


@click.command()
@click.option("--text", default="help-topics", show_default=True)
@click.option("--tokens", default=2048, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(text: str, tokens: int, rounds: int, target: str) -> None:
    model, tokenizer = load_model("smollm2")
    words = read_text(text)
    ids = cut_windows(model, tokenizer, words, tokens + 1, 1)[:, :tokens]
    full = KVCache(model, "full")
    fill(full, ids, silent)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        checkpoint = Path(place) / "model"
        model.save_pretrained(checkpoint)
        for spec in METHODS:
            made = None
            if parse_method(spec).needs_calibration:
                with torch.inference_mode(False):
                    made = calibrate(model, tokenizer, spec, words, 256, 16, name=text_name(text))
                made.save(checkpoint / "calibration")
            torch.set_num_threads(1)
            times: Times = defaultdict(list)
            for number in range(rounds + 1):
                own: Times = defaultdict(list)
                _converted(own, full, spec, made)
                _stored(own, full, ids, spec, made, Path(place) / f"{spec}-{number}")
                _chunks(own, full, ids, spec, made, checkpoint)
                for name, seconds in own.items() if number else ():
                    times[name] += seconds
            for (path, what), seconds in times.items():
                rate = tokens / statistics.median(seconds)
                rows.append({"method": spec, "path": path, "what": what, "tokens_per_second": rate})
                rows[-1] |= {"seconds": seconds}
                click.echo(f"{spec:11} {path:12} {what:8} {rate:9.0f} tokens a second")
    write_json(target, stamp(rows, model="smollm2", dtype="float32", text=text_name(text), tokens=tokens))


def _timed(times: Times, path: str, what: str, work: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    found = work()
    times[path, what].append(time.perf_counter() - started)
    return found


def _converted(times: Times, full: KVCache, spec: str, made: Calibration | None) -> None:
    packed = _timed(times, "converted", "packed", lambda: full.converted(spec, made))
    _timed(times, "converted", "unpacked", lambda: packed.converted("full"))


def _stored(
    times: Times, full: KVCache, ids: Tensor, spec: str, made: Calibration | None, place: Path
) -> None:
    store = PrefixStore(place, full.attachment.view.model, spec, calibration=made)
    _timed(times, "PrefixStore", "packed", lambda: store.put(full, ids))
    longer = torch.cat([ids, ids[:, :1]], 1)
    _timed(times, "PrefixStore", "unpacked", lambda: store.get(longer, "full"))


def _chunks(
    times: Times, full: KVCache, ids: Tensor, spec: str, made: Calibration | None, checkpoint: Path
) -> None:
    file = None if made is None else str(checkpoint / "calibration")
    known = Model(full.attachment.view.model.config, torch.float32, str(checkpoint))
    coder = ChunkCoder(known, Wanted(parse_method(spec), calibration=file), CHUNK)
    states = []
    for layer in full.compressed:
        assert layer.keys is not None and layer.values is not None
        each = (part[0].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values))
        states.append(torch.cat([*each], -1))
    starts = range(0, ids.shape[1] // CHUNK * CHUNK, CHUNK)
    parts = torch.stack(states).split(CHUNK, 1)

    def pack() -> list[Tensor]:
        each = zip(starts, parts, strict=False)
        return [coder.encode(rows, at, ids[0, at : at + CHUNK].tolist()) for at, rows in each]

    packed = _timed(times, "chunks", "packed", pack)
    _timed(times, "chunks", "unpacked", lambda: [coder.decode(held) for held in packed])


if __name__ == "__main__":
    main()

"""Resident memory of a process that decodes, with the full cache and with a method, against what the caches
say they hold.

    python benchmarks/resident.py --method kivi-4bit --json results.json

The model is smollm2 in fp32. Each cache lives in a process of its own, is filled with random states as
`xquant bench` fills it, and decodes. The resident set is read after every token, its peak all the time.

The C library keeps blocks that were freed for later. So each cache is measured twice: with the allocator as
it is (``default``), and with one that gives blocks of 128 KB or more back (``returning``: the threshold that
glibc starts with, kept from growing), where what is resident is what is in use.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import torch

from xquant import load_model, parse_method
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import Compressed, Contender, Full

FULL = "full"
ALLOCATORS = {"default": {}, "returning": {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}}
MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
PEAK_EVERY = 0.001


@click.command()
@click.option("--context", default=32768, show_default=True)
@click.option("--decode", default=16, show_default=True, help="Tokens; as many again warm up.")
@click.option("--method", "specs", multiple=True, default=["kivi-4bit"], show_default=True)
@click.option("--kernel", default="auto", show_default=True)
@click.option("--json", "target")
@click.option("--one", hidden=True)
def main(
    context: int,
    decode: int,
    specs: tuple[str, ...],
    kernel: str,
    target: str | None,
    one: str | None,
) -> None:
    if one is not None:
        click.echo(json.dumps(_measure(one, context, decode, kernel)))
        return
    if target is None:
        raise click.UsageError("--json FILE is needed")
    rows: list[dict[str, Any]] = []
    for allocator, settings in ALLOCATORS.items():
        full: dict[str, Any] = {}
        for name in (FULL, *specs):
            command = [sys.executable, __file__, "--one", name, "--kernel", kernel]
            command += ["--context", str(context), "--decode", str(decode)]
            run = subprocess.run(
                command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True
            )
            row = {"allocator": allocator, **json.loads(run.stdout)}
            full = full or row
            if row is not full:
                row |= _savings(full, row)
            rows.append(row)
            click.echo(
                f"{allocator:10} {name:20} cache {row['cache_bytes'] / 1e6:7.1f} MB, resident"
                f" {row['rss_bytes'] / 1e6:7.1f}, peak {row['peak_bytes'] / 1e6:7.1f},"
                f" freed and kept {row['freed_bytes'] / 1e6:6.1f}; saving measured / promised"
                f" {row.get('measured_over_promised', 1):.3f}"
            )
    write_json(target, stamp(rows, model="smollm2", dtype="float32"))


def _savings(full: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    promised = full["cache_bytes"] - row["cache_bytes"]
    measured = full["rss_bytes"] - row["rss_bytes"]
    return {
        "promised_saving": promised,
        "measured_saving": measured,
        "measured_over_promised": measured / promised,
        "in_use_over_promised": (measured - full["freed_bytes"] + row["freed_bytes"]) / promised,
        "peak_saving_over_promised": (full["peak_bytes"] - row["peak_bytes"]) / promised,
    }


@torch.inference_mode()
def _measure(name: str, context: int, decode: int, kernel: str) -> dict[str, Any]:
    """Bytes while decoding, the model included."""
    model, _ = load_model("smollm2")
    model(torch.zeros(1, 8, dtype=torch.long))  # threads and code that any forward pass brings
    loaded = _resident()
    contender: Contender
    if name == FULL:
        contender = Full(model, "sdpa", context, 1)
    else:
        contender = Compressed(model, parse_method(name), context, 1, None, kernel)
    filled = _resident()
    for _ in range(decode):
        contender.step()
    at_rest = []
    with Peak() as peak:
        for _ in range(decode):
            contender.step()
            at_rest.append(_resident())
    return {
        "method": name,
        "context": context,
        "decode": 2 * decode,
        "kernel": contender.setting,
        "cache_bytes": contender.cache_bytes,
        "rss_bytes": statistics.median(at_rest),
        "rss_min_max": [min(at_rest), max(at_rest)],
        "peak_bytes": max(peak.highest, *at_rest),
        "freed_bytes": _freed(),
        "rss_of_model": loaded,
        "rss_when_filled": filled,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _freed() -> int:
    """Bytes that the program has freed and the C library has not given back."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]

    call = ctypes.CDLL(None).mallinfo2
    call.restype = Info
    found: int = call().fordblks
    return found


class Peak:
    """The highest resident set while it is entered."""

    def __enter__(self) -> "Peak":
        self.highest = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(PEAK_EVERY):
            self.highest = max(self.highest, _resident())


if __name__ == "__main__":
    main()

"""The README's tables of speed, from the results files of `xquant bench`.

python benchmarks/tables.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
METHODS = ("kivi-4bit", "kivi-2bit", "xquant-4bit", "xquant-cl-2bit")


def rows(name: str) -> dict[str, dict[str, Any]]:
    found = json.loads((RESULTS / f"bench-{name}.json").read_text())
    return {row["method"]: row for row in found}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *body):
        print("| " + " | ".join(cells) + " |")
    print()


def whole_decode() -> None:
    """Of SmolLM2, by context; how many times faster than the full cache each method is."""
    body = []
    for name in ("512", "2k", "8k", "32k"):
        found = rows(f"smollm2-{name}")
        full = found["full"]
        times = (f"{found[m]['speedup_vs_full']:.2f}" if m in found else "" for m in METHODS)
        body.append([f"{full['context']:,}", f"{full['ms_per_token']:.0f} ms", *times])
    table(["context", "full cache", *(f"`{m}`" for m in METHODS)], body)


def peers() -> None:
    body = [
        [f"`{method}`", f"{row['ms_per_token']:.0f}", f"{row['cache_bytes'] / 1e6:.0f}"]
        for method, row in rows("smollm2-32k").items()
    ]
    table(["cache", "ms a token", "MB"], body)


def attention() -> None:
    """Of one layer of Llama-3.1-8B's shape."""
    short, long = rows("llama-8k"), rows("llama-32k")
    body = []
    for method in short:
        cells = [f"`{method}`"]
        for found in (short, long):
            row = found.get(method)
            if row is None:
                cells += ["", "", ""]
                continue
            times = f"{row['speedup_vs_full']:.1f}"
            size = f"{row['cache_bytes'] / 8e6:.0f}"
            cells += [f"{row['attention_ms_per_layer']:.2f}", times, size]
        body.append(cells)
    head = ["cache", *(f"{n}, {c}" for n in ("8K", "32K") for c in ("ms", "times", "MB a layer"))]
    table(head, body)


if __name__ == "__main__":
    whole_decode()
    peers()
    attention()

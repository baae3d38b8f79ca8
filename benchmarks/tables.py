"""The tables of the README and of pages in docs, from the results files.

python benchmarks/tables.py
python benchmarks/tables.py evaluation
python benchmarks/tables.py transform
python benchmarks/tables.py families
python benchmarks/tables.py upstream
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xquant import parse_method

RESULTS = Path(__file__).with_name("results")
METHODS = ("kivi-4bit", "kivi-2bit", "xquant-4bit", "xquant-cl-2bit")


def rows(name: str, verb: str = "bench") -> dict[str, dict[str, Any]]:
    found = json.loads((RESULTS / f"{verb}-{name}.json").read_text())
    return {row["method"]: row for row in found}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *body):
        print("| " + " | ".join(cells) + " |")
    print()


def quality() -> None:
    """Of SmolLM2 on WikiText-2: first the methods that keep no recent tokens full, then the others."""
    found = rows("smollm2", "wikitext2")
    with_tail = {method: parse_method(method).tail > 0 for method in found}
    head = ["method", "perplexity", "of full", "±", "KL", "same token"]
    head += ["bits per value", "in codes", "of fp16 cache"]
    for tail in (False, True):
        body = [
            [
                f"`{method}`",
                f"{row['perplexity']:.2f}",
                f"{row['ratio']:.3f}",
                f"{row['ratio'] * row['difference_error']:.3f}",
                f"{row['kl']:.3f}",
                f"{row['agreement']:.1%}",
                f"{row['bits_per_value']:.2f}",
                f"{row['code_bits']:.2f}",
                f"{row['cache_ratio']:.1%}",
            ]
            for method, row in found.items()
            if with_tail[method] == tail
        ]
        table(head, body)


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


def texts(**files: str) -> None:
    """Results of `xquant perplexity` side by side, each under its name: the methods of the last."""
    found = {name: rows("smollm2", file) for name, file in files.items()}
    *_, last = found.values()
    head = ["method", "bits per value"]
    for name in found:
        head += [f"{name}, of full", "±", "KL", "same token"]
    body = []
    for method, row in last.items():
        cells = [f"`{method}`", f"{row['bits_per_value']:.2f}"]
        for own in (of_text[method] for of_text in found.values()):
            cells += [
                f"{own['ratio']:.3f}",
                f"{own['ratio'] * own['difference_error']:.3f}",
                f"{own['kl']:.3f}",
                f"{own['agreement']:.1%}",
            ]
        body.append(cells)
    table(head, body)


def tasks(name: str) -> None:
    """Scores of a results file of `xquant eval`: a line a method, a column a task and metric; then how many
    rows were answered as with the full cache. Of the metrics of TruthfulQA those of BLEU."""
    found = json.loads((RESULTS / f"{name}-smollm2.json").read_text())
    columns: dict[str, dict[str, str]] = {}
    same: dict[str, dict[str, str]] = {}
    for row in found:
        # LongBench names its score twice.
        if row["metric"].startswith("rouge") or row["metric"].endswith(("_diff", "_score")):
            continue
        made_to = f" {row['context']:,}" if row["context"] else ""
        value = f"{row['value']:.3f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.3f}")
        metric = "" if row["metric"] == str(row["context"]) else f", {row['metric']}"
        columns.setdefault(f"{row['task']}{made_to}{metric}", {})[row["method"]] = value
        if row["agreement"] is not None:
            same.setdefault(f"{row['task']}{made_to}, as full", {})[row["method"]] = (
                f"{row['agreement']} of {row['n']}"
            )
    columns |= same
    methods = dict.fromkeys(row["method"] for row in found)
    table(
        ["method", *columns],
        [[f"`{m}`", *(cells.get(m, "") for cells in columns.values())] for m in methods],
    )


def passkeys(name: str) -> None:
    """Numbers found, of those asked for, and the depths at which they were not."""
    found = json.loads((RESULTS / f"{name}-smollm2.json").read_text())
    contexts = sorted({row["context"] for row in found})
    body = []
    for method in dict.fromkeys(row["method"] for row in found):
        cells = [f"`{method}`"]
        for context in contexts:
            own = [r for r in found if r["method"] == method and r["context"] == context]
            lost = ", ".join(f"{r['depth']:g}" for r in own if r["found"] < r["samples"])
            cells.append(
                f"{sum(r['found'] for r in own)} of {sum(r['samples'] for r in own)}"
                + (f" (lost at {lost})" if lost else "")
            )
        body.append(cells)
    table(["method", *(f"{context:,}" for context in contexts)], body)


def families() -> None:
    """A line a family: of full and its standard error, then KL, then bits per value; empty where a method
    refused."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "families.json").read_text()):
        found.setdefault(row["family"], {})[row["method"]] = row
    methods = [method for method in next(iter(found.values())) if method != "full"]
    shown: dict[str, Callable[[dict[str, Any]], str]] = {
        "of full": lambda row: f"{row['ratio']:.4f} ± {row['ratio'] * row['difference_error']:.4f}",
        "KL": lambda row: f"{row['kl']:.5f}",
        "bits per value": lambda row: f"{row['bits_per_value']:.2f}",
    }
    for name, cell in shown.items():
        body = []
        for family, own in found.items():
            cells = (cell(own[m]) if "ratio" in own[m] else "" for m in methods)
            body.append([family, f"{own['full']['perplexity']:.2f}", *cells])
        table([name, "perplexity, full", *(f"`{m}`" for m in methods)], body)


def upstream() -> None:
    """Of transformers' own generation tests, by family: passed of all in which the cache was used."""
    found = json.loads((RESULTS / "upstream.json").read_text())
    methods = list(dict.fromkeys(row["method"] for row in found))
    by_family: dict[str, dict[str, tuple[int, int]]] = {}
    for row in found:
        for family in (row["family"], "all"):
            own = by_family.setdefault(family, {})
            right, total = own.get(row["method"], (0, 0))
            own[row["method"]] = right + row["passed"], total + row["tests"]
    order = [*(family for family in by_family if family != "all"), "all"]
    body = [
        [family, *("{} of {}".format(*by_family[family][m]) for m in methods)] for family in order
    ]
    table(["family", *(f"`{method}`" for method in methods)], body)


if __name__ == "__main__":
    if sys.argv[1:] == ["upstream"]:
        upstream()
    elif sys.argv[1:] == ["evaluation"]:
        texts(**{"WikiText-2": "wikitext2", "C4": "c4"})
        passkeys("passkey")
        for file in ("truthfulqa", "gsm8k", "ruler", "longbench"):
            tasks(file)
    elif sys.argv[1:] == ["transform"]:
        texts(**{"WikiText-2": "tc-wikitext2", "C4": "tc-c4"})
        texts(**{"2,048": "tc-moby-2048", "6,000": "tc-moby-6000"})
        passkeys("passkey-tc")
        texts(**{"WikiText-2": "tc-options"})
    elif sys.argv[1:] == ["families"]:
        families()
    else:
        quality()
        whole_decode()
        peers()
        attention()

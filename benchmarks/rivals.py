"""Rivals and our own methods on three kinds of text, with equal sinks and tails.

    python benchmarks/rivals.py --wikitext FILE --c4 FILE --json results.json

Each method reads windows of WikiText-2, C4 and Python source twice, with 4 sinks: with every token in the
store, and with the last 128 tokens in full, as `generate()` keeps some. Bits count everything but the tail:
codes, ranges, sinks. The source is that of installed packages (`texts`). Methods that need a calibration have
that of the model's own writing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from texts import source_versions, texts, with_c4, with_wikitext

from xquant import load_model, own_calibration, parse_method
from xquant.results import stamp, write_json
from xquant.runs import Runs
from xquant.text import cut_windows
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.perplexity import measure

METHODS = (
    *("q8_0", "q4_0", "q4_0:rotate=true", "nvfp4", "nvfp4:four=true", "quarot-4bit", "quarot-2bit"),
    *("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "turboquant-3bit:qjl=true"),
    *("kvarn-k4v2", "kvarn-k2v2", "kvlinc-2bit"),
    *("pairs-4bit", "pairs-3bit", "pairs-2bit", "e8-2bit", "int4-gs64"),
    *("oscar-2bit", "oscar-4bit:key_clip=1,value_clip=1"),
    *("kivi-4bit", "kivi-2bit", "xquant-4bit", "kvquant-3bit-1%"),
    *("tc-2bit", "tc-cl-2bit", "tc-cl-1bit"),
    *("tc-2bit:group=256,classes=4", "tc-cl-2bit:group=256,classes=4", "tc-cl-1bit:group=256,classes=4"),
)
KEPT = {"4 sinks": (4, 0), "4 sinks, 128 recent": (4, 128)}


@click.command()
@with_wikitext
@with_c4
@click.option("--context", default=2048, show_default=True)
@click.option("--windows", default=4, show_default=True)
@click.option("--method", "specs", multiple=True, default=METHODS)
@click.option("--resume", help="A folder that keeps what is finished.")
@click.option("--json", "target", required=True)
def main(
    wikitext: str,
    c4: str,
    context: int,
    windows: int,
    specs: tuple[str, ...],
    resume: str | None,
    target: str,
) -> None:
    model, tokenizer = load_model("smollm2")
    methods = [parse_method(spec) for spec in specs]
    wanted = {
        (method.spec, kept): replace(method, sink=sink, tail=tail)
        for method in methods
        for kept, (sink, tail) in KEPT.items()
    }
    made = [own_calibration(model, tokenizer, m) for m in wanted.values() if m.needs_calibration]
    rows: list[dict[str, Any]] = []
    for name, text in texts(c4, wikitext).items():
        ids = cut_windows(model, tokenizer, text, context, windows)
        place = None if resume is None else Path(resume) / f"{name}.json"
        journal = Journal(Runs(place, {"text": name, "windows": windows}))
        measured = measure(model, ids, list(wanted.values()), made, journal)
        found = {row.method: row.to_dict() for row in measured}
        for (spec, kept), method in wanted.items():
            row = {**found[method.spec], "of": spec, "kept": kept, "text": name}
            rows.append(row)
            click.echo(f"{name:14} {kept:20} {spec:26} {row['ratio']:.3f} KL {row['kl']:.4f}")
    write_json(target, stamp(rows, model="smollm2", dtype="float32", source_of=source_versions()))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

"""All that a borrowed GPU is wanted for, in less than ten minutes.

    python benchmarks/gpu.py --output results

It runs in a copy of the repository and installs nothing: what it needs is torch with CUDA, Triton,
transformers, click, rich, pytest and hypothesis. Every stage is a process of its own with its own time, the
most wanted first; when one fails, or takes too long, the next goes on. After every stage the folder has its
rows (`NAME.json`) and its log, `stages.json`, `bars.json`, and all tables in `tables.txt`.

`--quick --device cpu` rehearses it without a GPU, on a model of next to nothing, in Triton's interpreter:
what that measures means nothing.
"""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from xquant.cli.bench_tables import print_largest, print_rows
from xquant.cli.common import print_table
from xquant.results.rows import read_results, write_json

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]

KVQUANT = "kvquant-4bit-1%:datatype=nf,scales=online"
BARS = (
    ("kivi-4bit", "speedup_vs_full", 2.5, 32768),
    ("kivi-2bit", "speedup_vs_full", 3.5, 32768),
    (KVQUANT, "speedup_vs_full", 1.7, 32768),
    ("kivi-4bit", "share_of_copy_bandwidth", 0.6, 131072),
)
"""Of attention alone: a method, what of its row, how much of it at least, from how many tokens on."""
LEAST = 10.0
"""Seconds below which no stage is started."""
WHOLE = {
    "shape": "llama-3.1-8b",
    "sizes": "--context 8192 --context 32768 --context 131072 --batch 1 --batch 8 --batch 32",
    # Every layer wants a decomposition of its weights: fewer of them.
    "latents": "--context 8192 --context 32768 --context 131072 --batch 1 --batch 8 --layers 8",
    "deltas": "--context 8192 --batch 1 --batch 8 --layers 8",
    "sealing": "--context 8192 --batch 1 --batch 8",
    "largest": "--context 8192 --context 32768",
}
QUICK = {
    "shape": "tiny",
    "sizes": "--context 128 --context 256 --batch 1 --layers 1 --rounds 1",
    "latents": "--context 128 --layers 1 --rounds 1",
    "deltas": "--context 128 --layers 4 --rounds 1",
    "sealing": "--context 128 --layers 1 --rounds 1",
    "largest": "--context 128",
}
"""Options of `xquant bench`, by what is measured."""
CEILINGS = """
import sys
import torch
from xquant.bench import ceilings
from xquant.results import rows as results
row = ceilings.as_row(torch.device(sys.argv[1]))
results.write_json(sys.argv[2], results.stamp([row]))
"""
# Triton 3.6 and numpy 2.4 need it: see tests/interpreted.py.
INTERPRETED = """
import interpreted
interpreted.mend()
from xquant.cli import main
raise SystemExit(main())
"""
OUTCOME = re.compile(
    r"(?P<before>\S+::\S+) (?P<late>PASSED|FAILED|ERROR|SKIPPED)"
    r"|(?P<early>PASSED|FAILED|ERROR|SKIPPED) (?P<after>\S+::\S+)"
)
"""Of a test, as pytest says it, with workers or without."""


@dataclass(frozen=True)
class Stage:
    """A process, with the seconds that it may take, that leaves ``NAME.json``."""

    name: str
    seconds: float
    arguments: Sequence[str]
    """Of Python."""


@dataclass(frozen=True)
class Done:
    """What became of a stage."""

    stage: str
    outcome: str
    seconds: float


def stages(device: str, quick: bool, output: Path) -> list[Stage]:
    """All of them, the most wanted first."""
    asked, on_cpu = QUICK if quick else WHOLE, device == "cpu"

    def bench(name: str, seconds: float, what: str, *options: str) -> Stage:
        command = ["-c", INTERPRETED] if on_cpu else ["-m", "xquant.cli"]
        command += ["bench", "--shape", asked["shape"], "--device", device]
        command += shlex.split(" ".join([asked[what], *options]))
        return Stage(name, seconds, [*command, "--json", str(output / f"{name}.json")])

    kernel, kvquant = "--kernel triton", f"--method '{KVQUANT}'"
    both = "--method kivi-4bit --method kivi-2bit"
    # Whole models are too much for the interpreter.
    largest = "--memory 0.002" if on_cpu else kernel
    return [
        Stage("ceilings", 40, ["-c", CEILINGS, device, str(output / "ceilings.json")]),
        Stage("tests", 150, _tests(quick)),
        bench("kivi-4bit", 75, "sizes", kernel, "--method kivi-4bit"),
        bench("kivi-2bit", 60, "sizes", kernel, "--method kivi-2bit"),
        bench("kvquant", 75, "sizes", kernel, kvquant),
        bench("xquant", 60, "latents", kernel, "--method xquant-4bit"),
        bench("sealing", 40, "sealing", kernel, "--sealing", both, kvquant),
        bench("largest", 120, "largest", "--largest-batch", largest, both),
        bench("xquant-cl", 40, "deltas", kernel, "--method xquant-cl-2bit"),
        Stage("static", 60, _tests(quick, "static")),  # a whole step as a graph
        Stage("ranked", 120, _tests(quick, "ranked")),  # their kernels take long to compile
    ]


def _tests(quick: bool, of: str = "kernels") -> list[str]:
    """pytest on the kernels, on many workers where it knows how: most of the time they are compiled."""
    command = ["-m", "pytest", "-vv", "-p", "no:cacheprovider", "--tb=short"]
    if quick:
        return [*command, "tests/kernels/test_triton.py::test_parts_are_joined"]
    if find_spec("xdist"):
        command += ["-n", str(min(os.cpu_count() or 1, 12))]
    if of == "static":
        return [*command, "tests/static/test_recorded.py", "tests/static/test_trial.py"]
    files = sorted((ROOT / "tests" / "kernels").glob("test_triton*.py"))
    names = [str(file.relative_to(ROOT)) for file in files]
    return [*command, *(name for name in names if ("ranked" in name) == (of == "ranked"))]


def run(stage: Stage, device: str, output: Path, seconds: float, kept: str) -> Done:
    """Run a stage for so many seconds at most; ``kept``: the folder of compiled kernels."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests")),
        "TRITON_CACHE_DIR": kept,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "XQUANT_TEST_DEVICE": device,
    }
    start, log = time.monotonic(), output / f"{stage.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            **{"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            said = log.read_text().strip().splitlines() or [f"status {code}"]
            outcome = "done" if code == 0 else f"failed: {said[-1][:200]}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and its workers
            process.wait()
            outcome = f"stopped after {seconds:.0f} s"
    return Done(stage.name, outcome, time.monotonic() - start)


def tests(log: str) -> Row:
    """How many tests had which outcome, and which failed, from what pytest has written so far."""
    found = {
        match["before"] or match["after"]: match["early"] or match["late"]
        for match in OUTCOME.finditer(log)
    }
    counts = Counter(outcome.lower() for outcome in found.values())
    failing = [test for test, outcome in found.items() if outcome in ("FAILED", "ERROR")]
    return {**counts, "failing": failing}


def bars(rows: Sequence[Row]) -> list[Row]:
    """Each bar at every size that was measured, or once where none was."""
    found = []
    for method, what, least, context in BARS:
        bar = {"method": method, "what": what, "least": least, "from_context": context}
        there = [
            {"context": row["context"], "batch": row["batch"], "measured": row[what]}
            for row in rows
            if row["method"] == method and row["context"] >= context and row[what] is not None
        ]
        for size in there or [{"context": None, "batch": None, "measured": None}]:
            measured = size["measured"]
            met = None if measured is None else measured >= least
            found.append({**bar, **size, "met": met})
    return found


class Report:
    """What the folder holds so far."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.done: list[Done] = []

    def rows(self, *names: str) -> list[Row]:
        """Of the stages that left some."""
        files = [self._output / f"{name}.json" for name in names]
        return [row for file in files if file.exists() for row in read_results(file)]

    def write(self) -> str:
        """Write the summaries. Returns all tables."""
        known = self.rows("ceilings")
        common = {name: known[0][name] for name in ("schema", "environment")} if known else {}
        attention = self.rows("kivi-4bit", "kivi-2bit", "kvquant", "xquant", "xquant-cl")
        reached = bars(attention)
        logs = [self._output / f"{name}.log" for name in ("tests", "static", "ranked")]
        said = "\n".join(log.read_text() for log in logs if log.exists())
        checked = tests(said) if said else {}
        for name, rows in (
            ("stages", [asdict(done) for done in self.done]),
            ("bars", reached),
            ("tests", [checked]),
        ):
            write_json(self._output / f"{name}.json", [{**row, **common} for row in rows])
        with redirect_stdout(io.StringIO()) as text:
            self._print(known, checked, attention, reached)
        (self._output / "tables.txt").write_text(text.getvalue())
        return text.getvalue()

    def _print(
        self, known: list[Row], checked: Row, attention: list[Row], reached: list[Row]
    ) -> None:
        _heading("Stages")
        lines = [(done.stage, done.outcome, f"{done.seconds:.0f}") for done in self.done]
        print_table({"stage": "left", "outcome": "left", "s": "right"}, lines)
        if known:
            _heading("The device")
            print_table({"": "left", " ": "right", "  ": "left"}, _device(known[0]))
        if checked:
            _heading("Tests of the kernels")
            print_table({"": "left", "tests": "left"}, [(k, str(v)) for k, v in checked.items()])
        if attention:
            _heading("Attention of a decoding step")
            print_rows(attention)
        if rows := [row for row in self.rows("sealing") if "block" in row.get("sealing", ())]:
            _heading("Appending and sealing, launched by Python, beside attention alone")
            columns = (
                "method",
                "context",
                "batch",
                "append, ms a token",
                "seal, ms a block",
                "share",
            )
            print_table(dict.fromkeys(columns, "left"), map(_sealing, rows))
        if rows := self.rows("largest"):
            _heading("The largest batch, whole decoding steps")
            print_largest(rows)
        _heading("Bars")
        columns = ("method", "what", "at least", "context", "batch", "measured", "met")
        print_table(dict.fromkeys(columns, "left"), map(_bar, reached))


def _heading(text: str) -> None:
    print(f"\n{text}\n")


def _device(row: Row) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [("device", str(row.get("name", row["device"])), "")]
    for name, label, unit, word in (
        ("read", "reading", 1e9, "GB/s"),
        ("copy", "copying, read and written", 1e9, "GB/s"),
        ("multiply", "a large product in bf16", 1e12, "TFLOP/s"),
        ("memory_bytes", "memory", 1e9, "GB"),
        ("multiprocessors", "multiprocessors", 1, ""),
    ):
        if row.get(name) is not None:
            lines.append((label, f"{row[name] / unit:.1f}", word))
    return lines


def _sealing(row: Row) -> Sequence[str]:
    found = row["sealing"]
    return (
        *(row["method"], str(row["context"]), str(row["batch"])),
        f"{found['append_ms_per_token']:.3f}",
        f"{found['seal_ms_per_block']:.3f}",
        f"{found['share_of_attention_and_storing']:.1%}",
    )


def _bar(row: Row) -> Sequence[str]:
    start = (row["method"], row["what"], f"{row['least']} from {row['from_context']}")
    if row["measured"] is None:
        return (*start, "", "", "not measured", "")
    size = str(row["context"]), str(row["batch"])
    return (*start, *size, f"{row['measured']:.2f}", "yes" if row["met"] else "no")


@click.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--quick", is_flag=True, help="A rehearsal on small sizes.")
@click.option("--minutes", default=9.5, show_default=True, help="For everything.")
@click.option("--stage", "wanted", multiple=True, help="Only this one; may be given several times.")
def main(output: Path, device: str, quick: bool, minutes: float, wanted: Sequence[str]) -> None:
    """Run the GPU's tests and benchmarks, and leave their results in a folder."""
    end = time.monotonic() + 60 * minutes
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    report, tables = Report(output), ""
    known = stages(device, quick, output)
    if unknown := set(wanted) - {stage.name for stage in known}:
        raise click.UsageError(f"no stage {', '.join(sorted(unknown))}")
    for stage in known:  # what is there afterwards is of this run
        for kind in ("json", "log"):
            (output / f"{stage.name}.{kind}").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as kept:
        for stage in known:
            if wanted and stage.name not in wanted:
                continue
            left = end - time.monotonic()
            if left < LEAST:
                done = Done(stage.name, "no time was left", 0.0)
            else:
                done = run(stage, device, output, min(stage.seconds, left), kept)
            report.done.append(done)
            click.echo(f"{done.stage}: {done.outcome}, {done.seconds:.0f} s")
            tables = report.write()
    click.echo(tables)


if __name__ == "__main__":
    main()

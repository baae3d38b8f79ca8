"""What the folder holds so far, as tables, and how it compares with what is wanted."""

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xquant.cli.tables import print_table
from xquant.results import write_json
from xquant_lab.results.read import read_results
from xquant_lab.verbs.bench_tables import print_largest, print_rows

from .plan import STAGES

Row = dict[str, Any]
Cells = Sequence[str]

BARS = [("kivi-4bit", 1.0, 2.0), ("kivi-2bit", 1.0, 2.0)]
"""A method, how many times as fast as the fastest fp16 attention it must be, and is wished to be. Below 1
nobody who has the memory would take it. It reads a quarter and an eighth of the bytes, and what decoding one
costs in instructions keeps it from four and eight times."""
TIMED = ("attention", "steps", "others", "sealing", "largest")
"""Stages in whose rows nothing may have failed; of the ways to launch a kernel, some may be refused."""
BAR_SIZES = {(32832, 8), (32832, 16)}
"""Contexts and batches that keep all multiprocessors busy."""


@dataclass(frozen=True)
class Done:
    """What became of a stage."""

    stage: str
    outcome: str
    seconds: float


def bars(rows: Iterable[Row]) -> list[Row]:
    """Each bar at every size that was measured, or once where none was."""
    there, found = list(rows), list[Row]()
    for method, least, wished in BARS:
        bar: Row = {"method": method, "least": least, "wished": wished}
        sizes = [
            row for row in there if row["method"] == method and (row["context"], row["batch"]) in BAR_SIZES
        ]
        for row in sizes or [dict.fromkeys(("context", "batch", "kernel", "speedup_vs_full"))]:
            measured = row["speedup_vs_full"]
            bar |= {name: row[name] for name in ("context", "batch", "kernel")}
            found.append({**bar, "measured": measured, "met": measured and measured >= least})
    return found


class Report:
    """Writes the summaries."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.done: list[Done] = []

    def rows(self, name: str) -> list[Row]:
        """Of a stage, if it left some."""
        file = self._output / f"{name}.json"
        return read_results(file) if file.exists() else []

    @property
    def good(self) -> bool:
        """Whether every stage went well, and nothing that was measured is below what must be."""
        broken = [done for done in self.done if done.outcome.startswith("failed")]
        wrong = [row for row in self.rows("correct") if not row["right"]]
        failed = [row for row in self.rows("tests") if row["outcome"] == "failed"]
        failed += [row for name in TIMED for row in self.rows(name) if row["failed"]]
        unmet = [bar for bar in bars(self.rows("attention")) if bar["met"] is False]
        return not (broken or wrong or failed or unmet)

    def write(self) -> str:
        """Write the summaries. Returns all tables."""
        stamped = next((rows[0] for stage in STAGES if (rows := self.rows(stage.name))), {})
        common: Row = {name: stamped[name] for name in ("schema", "environment") if name in stamped}
        for name, rows in (
            ("stages", [asdict(done) for done in self.done]),
            ("bars", bars(self.rows("attention"))),
            ("tuned", [row for row in self.rows("sweep") if row["won"]]),
        ):
            write_json(self._output / f"{name}.json", [{**row, **common} for row in rows])
        with redirect_stdout(io.StringIO()) as text:
            self._print()
        (self._output / "tables.txt").write_text(text.getvalue())
        return text.getvalue()

    def _print(self) -> None:
        for heading, name, show in SECTIONS:
            if rows := self.rows(name):
                print(f"\n{heading}\n")
                show(rows)
        print("\nBars: times the fastest fp16 attention\n")
        _table(("method", "least", "wished", "context", "batch", "kernel", "measured", "met"))(
            bars(self.rows("attention"))
        )
        print("\nStages\n")
        _table(("stage", "outcome", "seconds"))([asdict(done) for done in self.done])


def _table(fields: Sequence[str]) -> Callable[[list[Row]], None]:
    """Prints these fields of rows."""

    def show(rows: list[Row]) -> None:
        cells = [[_cell(row.get(field)) for field in fields] for row in rows]
        print_table(dict.fromkeys(fields, "left"), cells)

    return show


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None) or "its own"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _print_device(rows: list[Row]) -> None:
    hidden = ("schema", "environment", "model")
    cells = [(k, _cell(v)) for k, v in rows[0].items() if k not in hidden and v is not None]
    print_table({"": "left", " ": "left"}, cells)


def _print_correct(rows: list[Row]) -> None:
    wrong = [row for row in rows if not row["right"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} are right. Those that are not:\n")
    fields = ("method", "kernel", "head", "context", "batch", "mask", "error", "at_most", "failed")
    _table(fields)(wrong)


def _print_sweep(rows: list[Row]) -> None:
    shown = [row for row in rows if row["won"] or not row["options"]]
    _table(("method", "context", "batch", "options", "ms_per_layer", "won"))(shown)


def _print_sealing(rows: list[Row]) -> None:
    shown = [{**row, **row["sealing"]} for row in rows if row.get("sealing")]
    fields = ("append_ms_per_token", "seal_ms_per_block", "share_of_attention_and_storing")
    _table(("method", "context", "batch", *fields, "failed"))(shown)


def _print_tests(rows: list[Row]) -> None:
    counted = Counter(row["outcome"] for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in counted.items()) + "\n")
    _table(("test", "error", "where"))([row for row in rows if row["outcome"] == "failed"])


STEPS = ("method", "kernel", "context", "batch", "compiled", "ms_per_token", "speedup_vs_full")
SECTIONS: list[tuple[str, str, Callable[[list[Row]], None]]] = [
    ("The device", "ceilings", _print_device),
    ("Attention against double precision", "correct", _print_correct),
    ("Attention of a decoding step", "attention", print_rows),
    ("Whole steps in memory of a fixed size", "steps", _table((*STEPS, "peak_bytes", "failed"))),
    ("Ways to launch Triton's attend", "sweep", _print_sweep),
    ("Attention of other methods", "others", print_rows),
    ("Appending and sealing, launched by Python", "sealing", _print_sealing),
    ("The largest batch, whole decoding steps", "largest", print_largest),
    ("Tests", "tests", _print_tests),
]
"""A heading, the stage whose rows it is about, and what prints them."""

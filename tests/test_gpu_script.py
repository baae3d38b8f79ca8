"""benchmarks/gpu.py, rehearsed without a GPU, and without what a borrowed machine has not."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.result_rows import benched
from xquant_lab.results.read import read_results

pytest.importorskip("triton", minversion="3.5")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

ABSENT = ("platformdirs", "gguf")
"""Packages that a borrowed machine has not."""


def rehearsed(output: Path, stages: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The script, run to its end where `ABSENT` cannot be imported, and there is no native library."""
    blocked = output / "blocked"
    blocked.mkdir()
    for name in ABSENT:
        (blocked / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")]),
        "XQUANT_NATIVE_LIBRARY": str(blocked / "no-such-library"),
    }
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--quick", "--device", "cpu"]
    command += ["--output", str(output), *(f"--stage={name}" for name in stages)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_a_rehearsal_leaves_rows_and_tables(tmp_path: Path) -> None:
    wanted = ("ceilings", "others", "sealing", "largest", "racecheck")
    (tmp_path / "attention.json").write_text("from another run")
    done = rehearsed(tmp_path, wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert [(row["stage"], row["outcome"]) for row in stages] == [(n, "done") for n in wanted]
    assert not (tmp_path / "attention.json").exists()
    rows = read_results(tmp_path / "others.json", "ms_per_token", "kernel")
    assert [row["method"].partition(":")[0] for row in rows] == [*("full", "xquant-4bit", "kvquant-4bit-1%")]
    assert {row["kernel"] for row in rows[1:]} == {"triton (agrees with the reference)"}
    assert all(row["batch"] for row in read_results(tmp_path / "largest.json"))
    assert "triton: error " in (tmp_path / "racecheck.log").read_text()
    tables = (tmp_path / "tables.txt").read_text()
    for heading in ("Stages", "Appending and sealing", "The largest batch", "Bars"):
        assert f"\n{heading}" in tables


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"on_gpu.{name}")


def test_all_stages_together_fit_and_correctness_comes_before_what_is_timed(on_gpu: Any) -> None:
    stages = on_gpu("plan").STAGES
    assert sum(stage.seconds for stage in stages) < 540
    assert [stage.name for stage in stages][:3] == ["ceilings", "correct", "attention"]


STUBBORN = """
import os, time
def serve(pipe, *given):
    while (asked := pipe.recv()) is not None:
        if asked[0] == "dies":
            os._exit(7)
        time.sleep(60 if asked[0] == "hangs" else 0)
        pipe.send("done")
"""


def test_a_process_that_dies_or_hangs_is_started_again(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(str(tmp_path))
    supervised = on_gpu("supervised")
    monkeypatch.setattr(supervised, "serve", importlib.import_module("stubborn").serve)
    monkeypatch.setattr(supervised, "GRACE", 0.5)
    monkeypatch.setattr(supervised, "START", 0.0)
    worker = supervised.Worker(tmp_path, "cpu", True)
    outcomes = [worker.do(name, 20) for name in ("dies", "works")]
    outcomes += [worker.do("hangs", 0.5), worker.do("works", 20)]
    worker.close()
    assert outcomes == [
        "failed: its process ended with status 7",
        "done",
        "failed: stopped after 1 s",
        "done",
    ]


def test_a_command_that_takes_too_long_or_fails_is_told_of(on_gpu: Any, tmp_path: Path) -> None:
    run, log = on_gpu("apart").run, tmp_path / "log"

    def outcome(script: str, seconds: float) -> str:
        found: str = run([sys.executable, "-c", script], log, seconds)
        return found

    assert outcome("import time; time.sleep(60)", 0.5).startswith("cut short after")
    failed = outcome("print('so far', flush=True); raise SystemExit('no such thing')", 20)
    assert failed == "failed, status 1: no such thing"
    assert run(["no-such-tool"], log, 20) == "left out: there is no no-such-tool"


def test_outcomes_are_told_as_tests_end_and_one_case_of_each_comes_first(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_a(n): assert n == 1\n"
        "def test_b(): pytest.skip('no reason')\n"
        "@pytest.mark.parametrize('n', [1, 2, 3])\n"
        "def test_c(n): n == 3 and os._exit(1)\n"  # as a kernel may
    )
    told = tmp_path / "told.json"
    path = os.pathsep.join(str(BENCHMARKS.parent / folder) for folder in ("benchmarks", "src", "lab/src"))
    command = [sys.executable, "-m", "pytest", "-p", "on_gpu.told", f"--told={told}", str(tmp_path)]
    own = {name: each for name, each in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(command, env={**own, "PYTHONPATH": path}, capture_output=True, text=True)
    rows = read_results(told)
    outcomes = [(row["test"].partition("::")[2], row["outcome"]) for row in rows]
    assert outcomes == [
        *(("test_a[1]", "passed"), ("test_b", "skipped"), ("test_c[1]", "passed")),
        *(("test_a[2]", "failed"), ("test_c[2]", "passed")),
    ]
    assert rows[3]["error"].startswith("assert 2 == 1") and "test_it.py:3" in rows[3]["where"]
    assert "assert 2 == 1" in done.stdout


def test_bars_are_computed_from_rows(on_gpu: Any) -> None:
    given = [
        benched("kivi-4bit", 32832, 1.5, batch=8),
        benched("kivi-4bit", 32832, 0.9, batch=16),
        benched("kivi-4bit", 32832, 0.1, batch=1),
        {**benched("kivi-2bit", 32832, 1.0, batch=8), "speedup_vs_full": None},
    ]
    found = [(row["method"], row["batch"], row["met"]) for row in on_gpu("report").bars(given)]
    assert found == [("kivi-4bit", 8, True), ("kivi-4bit", 16, False), ("kivi-2bit", 8, None)]
    nothing = on_gpu("report").bars([])
    assert [(row["batch"], row["met"]) for row in nothing] == [(None, None)] * 2


def test_compiled_kernels_travel(on_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = on_gpu("kept")
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kernels")
    kept.empty()
    kernel = kept.FOLDER / "triton" / "hash" / "attend.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"kernel")
    kernel.with_suffix(".source").write_text("for people")
    kept.pack(tmp_path / "build" / "archive.tar.xz")
    kernel.write_bytes(b"another")
    kept.unpack(tmp_path / "build" / "archive.tar.xz")
    assert [file.name for file in kept.FOLDER.rglob("*.*")] == ["attend.cubin"]
    assert kernel.read_bytes() == b"kernel"

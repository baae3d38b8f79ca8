"""benchmarks/gpu.py, rehearsed without a GPU, and without what a borrowed machine has not."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from xquant.results.rows import read_results

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


def test_a_rehearsal_leaves_rows_and_tables(tmp_path: Path) -> None:
    wanted = ("ceilings", "others", "sealing", "largest", "racecheck")
    (tmp_path / "attention.json").write_text("from another run")
    done = rehearsed(tmp_path, wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert [(row["stage"], row["outcome"]) for row in stages] == [(n, "done") for n in wanted]
    assert not (tmp_path / "attention.json").exists()
    rows = read_results(tmp_path / "others.json", "ms_per_token", "kernel")
    assert [row["method"].partition(":")[0] for row in rows] == [
        *("full", "xquant-4bit", "kvquant-4bit-1%")
    ]
    assert {row["kernel"] for row in rows[1:]} == {"triton (agrees with the reference)"}
    assert all(row["batch"] for row in read_results(tmp_path / "largest.json"))
    assert (tmp_path / "racecheck.log").read_text().startswith("error ")
    tables = (tmp_path / "tables.txt").read_text()
    for heading in ("Stages", "Appending and sealing", "The largest batch", "Bars"):
        assert f"\n{heading}" in tables

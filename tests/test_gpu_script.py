"""benchmarks/gpu.py, rehearsed without a GPU on a model of next to nothing."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rows import benched
from xquant.results.rows import read_results

pytest.importorskip("triton", minversion="3.5")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rehearsal_leaves_rows_logs_and_tables(tmp_path: Path) -> None:
    wanted = ("ceilings", "kvquant", "sealing", "largest")
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu", "--output", str(tmp_path)]
    (tmp_path / "kivi-4bit.json").write_text("from another run")
    done = subprocess.run(
        [*command, *(f"--stage={name}" for name in wanted)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert [(row["stage"], row["outcome"]) for row in stages] == [(n, "done") for n in wanted]
    assert {p.stem for p in tmp_path.glob("*.log")} == set(wanted)
    assert not (tmp_path / "kivi-4bit.json").exists()
    rows = read_results(tmp_path / "kvquant.json", "ms_per_token", "kernel")
    ours = [row for row in rows if row["method"] != "full" and "kvquant" in row["method"]]
    assert [row["context"] for row in ours] == [128, 256]
    assert {row["kernel"] for row in ours} == {"triton (asked for)"}
    assert all(row["batch"] for row in read_results(tmp_path / "largest.json"))
    tables = (tmp_path / "tables.txt").read_text()
    for heading in ("Stages", "Appending and sealing", "The largest batch", "Bars"):
        assert f"\n{heading}" in tables
    bars = json.loads((tmp_path / "bars.json").read_text())
    assert len(bars) == 4 and {row["met"] for row in bars} == {None}  # such sizes were not run


def test_every_stage_gets_its_time_and_the_most_wanted_come_first(
    script: ModuleType, tmp_path: Path
) -> None:
    for device, quick in (("cuda", False), ("cuda", True), ("cpu", True)):
        found = script.stages(device, quick, tmp_path)
        names = [stage.name for stage in found]
        assert names[:3] == ["ceilings", "tests", "kivi-4bit"] and len(set(names)) == len(names)
    tests = script.stages("cuda", False, tmp_path)[1].arguments
    assert (
        "tests/kernels/test_triton.py" in tests and "tests/kernels/test_triton_graphs.py" in tests
    )


def test_a_stage_that_takes_too_long_or_fails_is_told_of(
    script: ModuleType, tmp_path: Path
) -> None:
    endless = script.Stage("endless", 1, ["-c", "import time; time.sleep(60)"])
    done = script.run(endless, "cpu", tmp_path, 0.5, str(tmp_path))
    assert done.outcome.startswith("stopped after")
    failing = script.Stage(
        "failing", 9, ["-c", "print('so far'); raise SystemExit('no such thing')"]
    )
    assert script.run(failing, "cpu", tmp_path, 9, str(tmp_path)).outcome == "failed: no such thing"


def test_bars_are_computed_from_rows(script: ModuleType) -> None:
    rows = [
        measured("kivi-4bit", 8192, 9.0, 0.9),
        measured("kivi-4bit", 32768, 2.6, 0.4),
        measured("kivi-4bit", 131072, 2.4, 0.7),
        measured("kivi-2bit", 131072, None, None),
    ]
    found = [
        (row["method"], row["what"], row["context"], row["measured"], row["met"])
        for row in script.bars(rows)
    ]
    assert found == [
        ("kivi-4bit", "speedup_vs_full", 32768, 2.6, True),
        ("kivi-4bit", "speedup_vs_full", 131072, 2.4, False),
        ("kivi-2bit", "speedup_vs_full", None, None, None),
        (script.KVQUANT, "speedup_vs_full", None, None, None),
        ("kivi-4bit", "share_of_copy_bandwidth", 131072, 0.7, True),
    ]


def measured(method: str, context: int, speedup: Any, share: Any) -> dict[str, Any]:
    row = benched(method, context, speedup or 1.0, share_of_copy_bandwidth=share)
    return {**row, "speedup_vs_full": speedup}


@pytest.mark.parametrize(
    "log",
    [
        "tests/a.py::test_x[kivi-4bit] PASSED [ 50%]\ntests/a.py::test_y FAILED [100%]\n"
        "FAILED tests/a.py::test_y - AssertionError\n",
        "[gw0] [ 50%] PASSED tests/a.py::test_x[kivi-4bit] \ntests/a.py::test_y \n"
        "[gw1] [100%] FAILED tests/a.py::test_y \n",
    ],
)
def test_outcomes_of_tests_are_read_as_far_as_they_went(script: ModuleType, log: str) -> None:
    assert script.tests(log) == {"passed": 1, "failed": 1, "failing": ["tests/a.py::test_y"]}
    assert script.tests("") == {"failing": []}

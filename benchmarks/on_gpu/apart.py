"""What may crash, in processes of its own: sampled tests, and a small call under a tool that finds races."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_WORKERS = 14
SANITIZER = "compute-sanitizer"
QUICK_TEST = "tests/kernels/test_triton.py::test_splits_are_combined"
FILES = ("cuda/test_*.py", "test_triton*.py")
LEFT_OUT = {"test_triton_compiles", "test_triton_variants", "test_triton_waits"}
"""Of these, files of tests that need no GPU."""
STATIC = (
    "tests/kernels/test_paged_trial.py",
    "tests/cache/test_static_recorded.py::test_a_graph_that_was_recorded_holds_for_other_steps_and_caches",
    "tests/cache/test_static_recorded.py::test_every_step_launches_the_same",
)

Command = Sequence[str]


def tests(output: Path, device: str, quick: bool) -> Command:
    """pytest on many workers: most of the time kernels are compiled. Of every test one case comes first."""
    command = [sys.executable, "-m", "pytest", "-p", "on_gpu.told", "-p", "no:cacheprovider"]
    command += [f"--told={output / 'tests.json'}", "--tb=short"]
    if quick:
        return [*command, QUICK_TEST]
    if find_spec("xdist"):
        command += ["-n", str(min(os.cpu_count() or 1, MOST_WORKERS))]
    folder = ROOT / "tests" / "kernels"
    files = [file for pattern in FILES for file in sorted(folder.glob(pattern))]
    names = [str(file.relative_to(ROOT)) for file in files if file.stem not in LEFT_OUT]
    return [*command, *names, *STATIC]


def racecheck(output: Path, device: str, quick: bool) -> Command:
    """One small call, in which kernels must not race."""
    small = [sys.executable, "-m", "on_gpu.small"]
    if device == "cpu":
        return small
    return [SANITIZER, "--tool", "racecheck", "--error-exitcode", "9", *small]


COMMANDS: dict[str, Callable[[Path, str, bool], Command]] = {"tests": tests, "racecheck": racecheck}


def run(command: Command, log: Path, seconds: float) -> str:
    """What became of it, within so many seconds at most."""
    if shutil.which(command[0]) is None:
        return f"left out: there is no {command[0]}"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and its workers
            process.wait()
            return f"cut short after {seconds:.0f} s"
    said = log.read_text().strip().splitlines() or ["it said nothing"]
    return "done" if status == 0 else f"failed, status {status}: {said[-1][:200]}"

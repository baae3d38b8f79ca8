"""Modules of this folder, each run in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def import_path(*more: Path) -> str:
    """PYTHONPATH of a process that imports what this one does, the tests, and what is in ``more`` folders."""
    return os.pathsep.join([*map(str, more), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m support.<module>``, with the tests among what it can import."""
    return subprocess.run(
        [sys.executable, "-m", f"support.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": import_path(), **environment},
        capture_output=True,
        text=True,
    )

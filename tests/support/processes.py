"""Modules of this folder, each run in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m support.<module>``, with the tests among what it can import."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", f"support.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )

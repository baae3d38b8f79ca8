"""The interpreter takes more than the compiler: the kernels are compiled too, for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5")


@pytest.mark.parametrize(
    "which", [[], *(pytest.param([each], marks=pytest.mark.long) for each in ("others", "ranked"))]
)
def test_the_kernels_compile(which: list[str], tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "compiled.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), *which], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]

"""The interpreter takes more than the compiler: the kernels are compiled too, for a GPU that is not there."""

from pathlib import Path

import pytest

from support.processes import run

pytest.importorskip("triton", minversion="3.5")


@pytest.mark.long  # takes two minutes; what they compute is tested in the interpreter
@pytest.mark.parametrize("which", [[], ["others"], ["ranked"]])
def test_the_kernels_compile(which: list[str], tmp_path: Path) -> None:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run("compile_kernels", *which, **own)
    assert done.returncode == 0, done.stderr[-3000:]

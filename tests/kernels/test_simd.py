"""Every operation on vectors gives what it says, whatever the instruction set."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from xquant.kernels.cpu import __file__ as package
from xquant.kernels.cpu import library as native

HEADERS = Path(package).parent / "csrc"
FLAGS = {  # as CMakeLists.txt
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512vnni -mfma -mf16c",
    "neon": "",
}
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.skipif(not shutil.which(COMPILER), reason="no C++ compiler")
@pytest.mark.parametrize("isa", native.isas())
def test_operations_of_an_instruction_set(isa: str, tmp_path: Path) -> None:
    program = tmp_path / "simd"
    source = Path(__file__).with_name("simd.cpp")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", *FLAGS[isa].split()]
    which = [f'-DSIMD="simd_{isa}.h"', f"-I{HEADERS}"]
    subprocess.run([COMPILER, *flags, *which, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")

"""Compiled kernels that travel to the GPU."""

import shutil
import tarfile
from pathlib import Path

FOLDER = Path("/tmp/xquant-gpu-kernels")
"""Where they are compiled and used: Triton notes absolute paths."""
COMPILED_WITH = {"TRITON_STORE_BINARY_ONLY": "1", "TRITON_DISABLE_LINE_INFO": "1"}
"""The environment of both: less is kept of a kernel, which is otherwise not found again."""


def unpacked(archive: Path) -> Path:
    """The folder, with what the archive holds."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(FOLDER, filter="data")
    return FOLDER


def pack(archive: Path) -> None:
    """Make the archive of what the folder holds."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as file:
        for each in sorted(FOLDER.iterdir()):
            file.add(each, each.name)

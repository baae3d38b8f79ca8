"""Compiled kernels that travel to the GPU."""

import shutil
import tarfile
from pathlib import Path

FOLDER = Path("/tmp/xquant-gpu-kernels")
"""Where they are compiled and used: Triton notes absolute paths."""


def environment(folder: Path) -> dict[str, str]:
    """What has kernels kept in a folder. Triton finds one again where it was told the same."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_STORE_BINARY_ONLY": "1",
        "TRITON_DISABLE_LINE_INFO": "1",
        "XQUANT_CACHE": str(folder / "xquant"),
    }


def empty() -> None:
    """Forget what is in the folder."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()


def unpack(archive: Path) -> None:
    """Put into the folder what the archive holds, and nothing else."""
    empty()
    with tarfile.open(archive) as file:
        file.extractall(FOLDER, filter="data")


def pack(archive: Path) -> None:
    """Make the archive of what is in the folder, but for what is read by people."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as file:
        for each in sorted(FOLDER.rglob("*")):
            if each.is_file() and each.suffix != ".source":
                file.add(each, each.relative_to(FOLDER))

"""Files that appear whole or not at all, and the folder of those that the package keeps."""

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE = "XQUANT_CACHE"
"""The environment variable that names the folder of what is kept."""
_UNFINISHED = ".xquant.tmp"
"""How the name of a folder ends in which something is being written."""


def cache_folder() -> Path:
    """Where what was made once is kept: the folder that `CACHE` names, else the platform's for caches."""
    if named := os.environ.get(CACHE):
        return Path(named)
    import platformdirs  # not on every machine that names a folder

    return Path(platformdirs.user_cache_dir("xquant"))


def write_atomically(target: str | Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all; a link is followed, a device is written to."""
    path, data = Path(target), content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of ``target`` when all is written; a link is followed. It has
    the mode of the file that it replaces, or that of any new one."""
    path = Path(os.path.realpath(target))  # `Path.resolve` fails at links that go in a circle
    with workplace(path.parent) as folder:
        temporary = folder / "content"
        temporary.touch()
        mode = temporary.stat().st_mode
        with suppress(OSError):
            mode = path.stat().st_mode
        temporary.chmod(stat.S_IMODE(mode) | stat.S_IRUSR | stat.S_IWUSR)
        yield temporary
        temporary.chmod(stat.S_IMODE(mode))  # safetensors leaves one that its owner alone may read
        temporary.replace(path)


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """A hidden folder in ``parent`` for what is to be moved out of it when it is whole. What processes that
    died left in ``parent`` is removed first."""
    remove_unfinished(parent)
    folder, descriptor = _locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_unfinished(parent: Path) -> None:
    """Remove folders of processes that died: whoever works in one holds it locked, and the system releases it
    with the process."""
    for folder in parent.glob(f".*{_UNFINISHED}"):
        with suppress(OSError):  # it is in use, another user's, or gone
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _locked(parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it locked."""
    while True:
        folder = parent / f".{secrets.token_hex(8)}{_UNFINISHED}"
        folder.mkdir()
        with suppress(FileNotFoundError):  # taken for one that was left, before it was locked
            try:
                descriptor = os.open(folder, os.O_RDONLY)
            except OSError:
                with suppress(OSError):
                    folder.rmdir()
                raise
            with suppress(OSError):  # where there are no locks, nothing is removed either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)

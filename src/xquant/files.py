"""Files that appear whole or not at all, and the folder of those that the package keeps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = "XQUANT_CACHE"
"""The environment variable that names the folder of what is kept."""


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
    """A file beside ``target`` to write to, which takes its place when all is written; a link is followed."""
    path = target.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

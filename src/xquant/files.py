"""Files that appear whole or not at all, and the folder of those that the package keeps."""

import os
from pathlib import Path

import platformdirs

CACHE = "XQUANT_CACHE"
"""The environment variable that names the folder of what is kept."""


def cache_folder() -> Path:
    """Where what was made once is kept: the folder that `CACHE` names, else the platform's for caches."""
    return Path(os.environ.get(CACHE) or platformdirs.user_cache_dir("xquant"))


def write_atomically(target: str | Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all; a link is followed, a device is written to."""
    path, data = Path(target), content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

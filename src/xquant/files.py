"""Files that appear whole or not at all."""

import os
from pathlib import Path


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

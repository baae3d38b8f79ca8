"""Results as a JSON array of rows. Each row holds all that is needed to repeat its measurement."""

import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import __version__
from .files import write_atomically

STDOUT = "-"
SCHEMA = 1
"""Version of the form of a row: raised when a field is dropped or changes its meaning."""


def environment() -> dict[str, Any]:
    """The command, the versions and the hardware of this process, as plain JSON values.

    ``threads`` and ``gpu`` are those that torch computes with: None where it was not imported, as nothing was
    computed.
    """
    from importlib.metadata import version  # not at once: it takes as long as click

    torch = sys.modules.get("torch")
    return {
        "command": _command(),
        "xquant": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "commit": _commit(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads() if torch else None,
        "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
    }


def stamp(rows: Iterable[Mapping[str, Any]], **subject: Any) -> list[dict[str, Any]]:
    """``rows`` made self-contained: with their ``subject`` (model, text ...), the version of their form
    and the environment."""
    where = environment()
    return [{**row, **subject, "schema": SCHEMA, "environment": where} for row in rows]


def write_json(target: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``rows`` to a file, or to standard output for ``"-"``.

    A number that is not finite becomes ``null``, since JSON has no other word for it.
    """
    text = json.dumps([_plain(row) for row in rows], indent=2, ensure_ascii=False) + "\n"
    if str(target) == STDOUT:
        sys.stdout.write(text)
    else:
        write_atomically(target, text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _command() -> str:
    name = Path(sys.argv[0]).name
    return shlex.join(["xquant" if name == "__main__.py" else name, *sys.argv[1:]])


def _commit() -> str | None:
    """The commit of the checkout that this file is tracked in, with ``-dirty`` where edited."""
    here = Path(__file__)
    # A package installed inside some other project's checkout is not tracked there.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

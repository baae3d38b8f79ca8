"""``xquant cache``: what the package keeps on this machine, how much that is, and an end to it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..files import cache_folder
from ..results import STDOUT
from ..sizes import readable
from .common import finish, json_option
from .tables import print_table, say, wide_option

KINDS = {"models": "smollm2-*", "calibrations": "calibrations/*", "kernels": "cuda/*"}
"""What is kept, and where in the folder: packaged models converted to safetensors, calibrations with the
texts that models wrote for them, and compiled kernels. All of it is made again where it is missing."""
ALL = "all"


@click.command()
@click.option(
    "--clear",
    "cleared",
    type=click.Choice((*KINDS, ALL)),
    multiple=True,
    help="Remove these; may be given several times. They are made again when they are next needed.",
)
@wide_option
@json_option
def cache(cleared: Sequence[str], json_file: str | None) -> None:
    """List what is kept on this machine: converted models, calibrations and compiled kernels.

    The folder is the user's for caches, or the one that the environment variable XQUANT_CACHE names.
    """
    rows: list[dict[str, Any]] = []
    folder = cache_folder()
    for kind, pattern in KINDS.items():
        removed = kind in cleared or ALL in cleared
        for path in sorted(folder.glob(pattern)):
            name = str(path.relative_to(folder))
            rows.append({"kind": kind, "path": name, "bytes": _size(path), "removed": removed})
            if removed:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finish(rows, json_file)
    if json_file == STDOUT:
        return
    if rows:
        columns = {"kind": "left", "size": "right", "path": "left", "": "left"}
        said = {True: "removed", False: ""}
        print_table(columns, [(r["kind"], readable(r["bytes"]), r["path"], said[r["removed"]]) for r in rows])
    left = sum(row["bytes"] for row in rows if not row["removed"])
    say(f"{readable(left)} in {folder}")


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())

"""Reads results files that a verb of ``xquant`` wrote with ``--json``."""

import json
from pathlib import Path
from typing import Any

from xquant.results import SCHEMA


def read_results(file: str | Path, *fields: str) -> list[dict[str, Any]]:
    """The rows of a results file, each of which holds ``fields``.

    Raises:
        ValueError: no results file, one of another version, or of rows without one of ``fields``.
        OSError: the file cannot be read.
    """
    try:
        rows = json.loads(Path(file).read_bytes())
    except ValueError as error:
        raise ValueError(f"'{file}' is not a results file: it holds no JSON ({error})") from None
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"'{file}' is not a results file: it holds no JSON array of rows")
    for row in rows:
        written = row.get("schema")
        if written is None:
            raise ValueError(f"'{file}' was written before rows had a schema number: measure again")
        if written != SCHEMA:
            raise ValueError(f"'{file}' is of schema {written}, and this xquant reads {SCHEMA}")
        missing = next((name for name in ("environment", *fields) if name not in row), None)
        if missing is not None:
            raise ValueError(f"'{file}' holds results of another kind: a row has no '{missing}'")
    return rows

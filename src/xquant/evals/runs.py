"""The finished parts of a long run, kept on disk so that the same run can go on after it was stopped."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from ..attention import attach
from ..calibrate.artifact import Calibration, fingerprint
from ..files import write_atomically

Rows = list[dict[str, Any]]


class Runs:
    """Parts of runs in a folder: a JSON file for each, written when the part is finished.

    A part is found again by a run of the same subject and the same code only, so that nothing stale is
    mixed in.

    Args:
        folder: made when the first part is saved. None keeps nothing.
        subject: all that the parts depend on, as plain JSON values: model, text, sizes.
    """

    def __init__(self, folder: str | Path | None, subject: Mapping[str, Any]) -> None:
        self._subject = {**subject, "code": code_digest()}
        key = hashlib.sha256(json.dumps(self._subject, sort_keys=True).encode()).hexdigest()
        self._folder = None if folder is None else Path(folder) / key[:16]

    def load(self, name: str) -> Rows | None:
        """The rows of the part ``name``, or None where it is not there or cannot be read."""
        if self._folder is None:
            return None
        try:
            held = json.loads(self._file(name).read_text())
        except (OSError, ValueError):
            return None
        rows: Rows | None = held["rows"] if held.get("name") == name else None
        return rows

    def save(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the rows of a finished part.

        Raises:
            OSError: the folder or the file cannot be written.
        """
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = {"name": name, "subject": self._subject, "rows": list(rows)}
        write_atomically(self._file(name), json.dumps(part, indent=2) + "\n")

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        readable = re.sub(r"[^\w.%=-]+", "_", name)[:80]
        return self._folder / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def identity(model: Any, text: str, calibrations: Sequence[Calibration]) -> dict[str, str]:
    """What a model, a text and calibrations are, beyond their names."""
    return {
        "weights": fingerprint(attach(model).view.compressed),
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "calibrations": " ".join(sorted(made.digest for made in calibrations)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@cache
def code_digest() -> str:
    """SHA-256 over the package's own Python files: results of edited code are those of other code."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()

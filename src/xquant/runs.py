"""The finished parts of a long run, kept on disk so that the same run can go on after it was stopped."""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from .calibration import Calibration
from .files import write_atomically
from .kernels.cpu import library as native
from .methods.registry import outside
from .seam.hooks import attach

Rows = list[dict[str, Any]]

_OURS = re.compile(r"xquant(_[a-z]+)?")


class Runs:
    """Parts of runs in a folder: a JSON file for each, written when the part is finished.

    A part is found again by a run of the same subject and the same code only, so that nothing stale is
    mixed in, and only as it was written: it has a digest of its own.

    Args:
        folder: made when the first part is saved. None keeps nothing.
        subject: all that the parts depend on, as plain JSON values: model, text, sizes.
    """

    def __init__(self, folder: str | Path | None, subject: Mapping[str, Any]) -> None:
        self._subject = json.dumps({**subject, "code": code_digest()}, sort_keys=True)
        key = hashlib.sha256(self._subject.encode()).hexdigest()
        self._folder = None if folder is None else Path(folder) / key[:16]

    def load(self, name: str) -> Rows | None:
        """The rows of the part ``name``, or None where it is not there. A file that is not what was written
        counts as none, and a line on standard error says so."""
        if self._folder is None:
            return None
        file = self._file(name)
        if not file.exists():
            return None
        try:
            held = json.loads(file.read_text())
            rows: Rows = held["rows"]
            if held["sha256"] == self._digest(name, rows):
                return rows
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            pass
        tell_unfit(file)
        return None

    def save(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the rows of a finished part.

        Raises:
            OSError: the folder or the file cannot be written.
        """
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        plain: Rows = json.loads(json.dumps(list(rows)))  # as it will be read
        part = {"name": name, "subject": json.loads(self._subject), "rows": plain}
        part["sha256"] = self._digest(name, plain)
        write_atomically(self._file(name), json.dumps(part, indent=2) + "\n")

    def forget(self) -> None:
        """Remove the parts of this subject."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _digest(self, name: str, rows: Rows) -> str:
        """SHA-256 over all that a part holds."""
        held = json.dumps([name, self._subject, rows], sort_keys=True)
        return hashlib.sha256(held.encode()).hexdigest()

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        readable = re.sub(r"[^\w.%=-]+", "_", name)[:80]
        return self._folder / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def identity(model: Any, text: str, calibrations: Iterable[Calibration]) -> dict[str, str]:
    """What a model, a text and calibrations are, beyond their names."""
    return {
        **attach(model).identity.now()._asdict(),
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "calibrations": " ".join(sorted(made.digest for made in calibrations)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def tell_unfit(file: Path) -> None:
    """Say that a file of a folder to resume from is of no use."""
    print(f"xquant: '{file}' is not what was written there: it is made anew", file=sys.stderr)


def code_digest() -> str:
    """SHA-256 over the Python files of our packages that are loaded, those of methods from outside, and the
    native library: results of edited code are those of other code."""
    digest, library = hashlib.sha256(), native.library_file()
    for name in sorted(name for name in sys.modules if _OURS.fullmatch(name)):
        for root in sys.modules[name].__path__:
            digest.update(_package_digest(Path(root)))
    for method, file in sorted(outside().items()):
        digest.update(method.encode() + file.read_bytes())
    if library is not None:
        digest.update(library.read_bytes())
    return digest.hexdigest()


@cache  # as the package was loaded: an edit does not change what this process runs
def _package_digest(root: Path) -> bytes:
    """SHA-256 over the Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root.parent)).encode() + file.read_bytes())
    return digest.digest()

"""What ``xquant bench`` has measured, as it comes."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from xquant.cli.common import finish
from xquant.cli.progress import FIRST
from xquant.results import STDOUT

if TYPE_CHECKING:
    from xquant.runs import Rows


class Report:
    """The rows of a run. They are in the file of ``--json`` after every round, and printed at the end of the
    run, whatever ended it.

    Args:
        show: prints rows as a table.
        json_file: as ``--json`` has it.
        subject: what all rows are of.
    """

    def __init__(
        self, show: "Callable[[Rows], None]", json_file: str | None, subject: Mapping[str, Any]
    ) -> None:
        self._show, self._file, self._subject = show, json_file, subject
        self._finished: Rows = []
        self._coming: Rows = []
        self._begun = time.monotonic()

    def see(self, rows: "Rows") -> None:
        """Take the rows of a part that is being measured. The first ones are shown on standard error, where
        they took some time."""
        first, self._coming = not self._coming, rows
        self._write()
        if first and time.monotonic() - self._begun > FIRST:
            with redirect_stdout(sys.stderr):
                self._show(rows)

    def add(self, rows: "Rows") -> None:
        """Take the rows of a part that is finished."""
        self._finished += rows
        self._coming, self._begun = [], time.monotonic()
        self._write()

    def end(self) -> None:
        """Print all that there is."""
        if rows := self._rows():
            if self._file == STDOUT:
                finish(rows, STDOUT, **self._subject)
            else:
                self._show(rows)

    def _rows(self) -> "Rows":
        return [*self._finished, *self._coming]

    def _write(self) -> None:
        if self._file not in (None, STDOUT):
            finish(self._rows(), self._file, **self._subject)

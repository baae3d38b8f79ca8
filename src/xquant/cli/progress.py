"""How far a command has come, on stderr: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ..progress import Progress

FIRST, EVERY = 5.0, 30.0
"""Seconds until the first line that says how long it will take, and between it and further ones."""


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Show the progress of the work called ``title``."""
    stream = sys.stderr  # kept, since some measurements redirect it while they run
    if stream.isatty():
        with _bar(stream) as show:
            yield show
    else:
        lines = Lines(title, stream)
        yield lines.show
        lines.end()


@contextmanager
def _bar(stream: TextIO) -> Iterator[Progress]:
    from rich import progress as bars
    from rich.console import Console

    columns = bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()
    bar = bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(file=stream), transient=True)
    with bar:
        task = bar.add_task("", visible=False)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what, visible=True)

        yield show


class Lines:
    """A line when a stage of the work begins, and from `FIRST` seconds on one every `EVERY` seconds, with the
    time that is left if the rest takes as long a part as what is done.

    A stage begins where the parts are counted anew.
    """

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._stream, self._clock = title, stream, clock
        self._begun = clock()
        self._done, self._total = 0, -1

    def show(self, done: int, total: int, what: str) -> None:
        """Say what there is to say now."""
        now = self._clock()
        if total != self._total or done < self._done:
            self._start, self._first, self._total, self._next = now, done, total, now + FIRST
            self._say(what)
        self._done = done
        if self._first < done < total and now >= self._next:
            left = (now - self._start) / (done - self._first) * (total - done)
            self._say(f"{what}: {done} of {total}, about {spoken(left)} left")
            self._next = now + EVERY

    def end(self) -> None:
        """Say that all is done, if it has begun."""
        if self._total >= 0:
            self._say("done")

    def _say(self, what: str) -> None:
        minutes, seconds = divmod(int(self._clock() - self._begun), 60)
        line = f"[{minutes}:{seconds:02d}] {self._title}" + (f", {what}" if what else "")
        print(line, file=self._stream, flush=True)


def spoken(seconds: float) -> str:
    """A time as one would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

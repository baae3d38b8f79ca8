"""How long work says how far it has come. The command line shows it (`cli.progress`); others may."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what runs next or just ran)."""


def silent(done: int, total: int, what: str) -> None:
    """A `Progress` that tells nobody."""

"""How a long computation reports its progress. The command line shows it as a bar (`cli.progress`)."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what runs next or just ran)."""


def silent(done: int, total: int, what: str) -> None:
    """A `Progress` that tells nobody."""

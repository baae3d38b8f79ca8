"""A check of what verbs print on terminals of several widths."""

from collections.abc import Callable

import click

from xquant.cli import tables

WIDTHS = 60, 80, 120
HEADINGS = {"method", "row", "id", "write", "option"}
"""Those that records do without, since they stand above their first cells."""


def check_whole(show: Callable[..., object], width: int, capsys, monkeypatch) -> str:
    """What ``show()`` prints on a terminal of ``width`` is no wider, and has whole words alone: those that it
    prints into a pipe, of which ``--wide`` leaves out none. What it prints without ``--wide`` is returned."""

    def printed(room: int | None, wide: bool = False) -> str:
        monkeypatch.setattr(tables, "room", lambda: room)
        with click.Context(click.Command("verb")) as context:
            context.meta[tables.WIDE] = wide
            show()
        return capsys.readouterr().out

    piped, fitted, wide = printed(None), printed(width), printed(width, wide=True)
    for out in fitted, wide:
        assert max(map(len, out.splitlines())) <= width, out
    words = set(piped.split())
    first = {line.split()[0] for line in piped.splitlines() if line[:1].strip()}
    assert words - set(wide.split()) <= HEADINGS
    assert set(wide.split()) <= words
    table, hint, left_out = fitted.partition("\n--wide shows")
    while hint:
        rest = left_out.partition("\n\n")[2]
        more, hint, left_out = rest.partition("\n--wide shows")
        table += "\n" + more
    assert set(table.split()) <= words
    assert first - set(fitted.split()) <= HEADINGS, "a row is missing"
    return fitted

"""Tables and lines on standard output, as wide as the terminal. A number or a name is never broken.

Where a table has no room, headings and texts break between words, then columns are left out, and what still
has no room is printed as records, a line for each cell. Without a terminal there is no width to fit: all
columns are printed, for grep and the like.
"""

import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

import click

WIDE = "xquant.wide"
"""Where the context of a command holds whether all columns are asked for."""
PIPED_WIDTH = 200
"""Characters of a line to which texts in tables are broken where there is no terminal."""
GAP = "  "
TEXT_LEAST = 20
"""Characters that a column of text keeps, if it has as many."""


def wide_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--wide``, of every verb that prints a table."""
    return click.option(
        "--wide",
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Show all columns, as records where the terminal is too narrow for them.",
    )(command)


def _remember(context: click.Context, option: click.Parameter, wide: bool) -> None:
    context.meta[WIDE] = wide


def room() -> int | None:
    """Characters of a line of the terminal, or None where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: str) -> None:
    """Print lines of text. Those too long for the terminal break between words, and go on below what stands
    after the first gap of two blanks."""
    for line in text.split("\n"):
        named = re.match(r" *\S.*?  +", line)
        click.echo("\n".join(_broken(line, room(), " " * named.end() if named else "")))


def print_table(
    columns: Mapping[str, str], rows: Iterable[Sequence[str]], extra: Collection[str] = ()
) -> None:
    """Print a table.

    Args:
        columns: each heading with its justification, ``left`` or ``right``, or with ``text`` for a column
            whose cells may break between words.
        rows: a cell for each column.
        extra: headings of columns that are left out where there is no room, the first one first.
    """
    width, context = room(), click.get_current_context(silent=True)
    if context is not None and context.meta.get(WIDE):
        extra = ()
    table: dict[str, list[str]] = {heading: [] for heading in columns}
    for row in rows:
        for cells, cell in zip(table.values(), row, strict=True):
            cells.append(cell)
    left_out = []
    for heading in extra:
        if width is None or _total(_least(columns, table)) <= width:
            break
        if table.pop(heading, None) is not None:
            left_out.append(heading)
    widths = _widths(columns, table, width or PIPED_WIDTH)
    if width is not None and _total(widths) > width:
        _print_records(table, width)
    else:
        _print_lines(columns, table, widths)
    if left_out:
        count = f"{len(left_out)} more column{'s' if len(left_out) > 1 else ''}"
        say(f"--wide shows {count}: {'; '.join(name for name in columns if name in left_out)}")


def _least(columns: Mapping[str, str], table: Mapping[str, Sequence[str]]) -> list[int]:
    """The least width of each column, in which no word is broken."""
    widths = []
    for heading, cells in table.items():
        least = _longest(cells)
        if columns[heading] == "text":
            least = min(least, max(TEXT_LEAST, _longest(" ".join(cells).split())))
        widths.append(max(least, _longest(heading.split())))
    return widths


def _widths(columns: Mapping[str, str], table: Mapping[str, Sequence[str]], width: int) -> list[int]:
    """The width of each column, the least ones if these take more than ``width``."""
    widths = _least(columns, table)
    whole = [_longest((heading, *cells)) for heading, cells in table.items()]
    texts = [columns[heading] == "text" for heading in table]

    def turn(place: int) -> tuple[bool, int]:
        """Texts come first, the narrowest before others; then headings, where least is wanting."""
        return not texts[place], widths[place] if texts[place] else whole[place] - widths[place]

    for _ in range(width - _total(widths)):
        narrow = [place for place, most in enumerate(whole) if widths[place] < most]
        if narrow:
            widths[min(narrow, key=turn)] += 1
    return widths


def _total(widths: Sequence[int]) -> int:
    """The width of a line."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _print_lines(
    columns: Mapping[str, str], table: Mapping[str, Sequence[str]], widths: Sequence[int]
) -> None:
    def lines(cells: Iterable[str], from_below: bool = False) -> Iterable[str]:
        parts = [_broken(cell, width) for cell, width in zip(cells, widths, strict=True)]
        if from_below:
            most = max(map(len, parts), default=0)
            parts = [[""] * (most - len(part)) + part for part in parts]
        for line in zip_longest(*parts, fillvalue=""):
            placed = zip(line, widths, table, strict=True)
            yield GAP.join(
                part.rjust(width) if columns[heading] == "right" else part.ljust(width)
                for part, width, heading in placed
            ).rstrip()

    for line in lines(table, from_below=True):
        click.echo(click.style(line, bold=True))
    for row in zip(*table.values(), strict=True):
        for line in lines(row):
            click.echo(line)


def _print_records(table: Mapping[str, Sequence[str]], width: int) -> None:
    """The first cell of each row, and below it a line for each other cell that holds something."""
    headings = [f"{GAP}{heading}{GAP}" for heading in list(table)[1:]]
    aligned = _longest(headings)
    for number, (name, *cells) in enumerate(zip(*table.values(), strict=True)):
        click.echo("\n" * (number > 0) + click.style(name, bold=True))
        for heading, cell in zip(headings, cells, strict=True):
            if cell:
                indent = aligned if aligned + _longest(cell.split()) <= width else len(heading)
                lines = _broken(cell, max(1, width - indent))
                click.echo(heading.ljust(indent) + f"\n{' ' * indent}".join(lines))


def _broken(text: str, width: int | None, indent: str = "") -> list[str]:
    """The text in lines, broken between words alone."""
    if width is None or len(text) <= width:
        return [text]
    found = wrap(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return found or [""]


def _longest(words: Iterable[str]) -> int:
    return max(map(len, words), default=0)

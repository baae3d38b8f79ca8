"""Writes the tables of measured figures, and what commands print, into README.md and docs/.

    python benchmarks/tables.py          # write them
    python benchmarks/tables.py --check  # name the pages where a table is not what the results say; status 1

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. The names are those of the functions in
`measured/` that are marked as `table`; figures are those of the results files. What stands between
``<!-- printed -->`` and ``<!-- end -->`` the command in the block before it prints. CI checks the pages.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import click
from measured import TABLES

from xquant.cli import main as run_xquant

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)
PAGE_WIDTH = 100
"""Characters of a block of code that a page shows without a scroll bar."""
PRINTED = re.compile(r"(```sh\n((?:(?!```).)*)```\n\n<!-- printed -->\n).*?(<!-- end -->)", re.S)


def filled(page: str) -> str:
    """The text of a page with its tables as the results have them, and what its commands print.

    Raises:
        ValueError: a table that is not known.
    """

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table '{name}': one of {', '.join(TABLES)}")
        return begin + "\n" + TABLES[name]() + "\n" + end

    def run(found: re.Match[str]) -> str:
        begin, command, end = found.groups()
        return f"{begin}```text\n{printed(command)}```\n{end}"

    return PRINTED.sub(run, MARKED.sub(fill, page))


class Terminal(io.StringIO):
    """Keeps what is printed, as wide as a block of a page."""

    def isatty(self) -> bool:
        return True


def printed(command: str) -> str:
    """What a command of ours prints in a terminal of `PAGE_WIDTH`, without the blanks that end a line.

    Raises:
        ValueError: it fails.
    """
    name, *words = shlex.split(command.replace("\\\n", ""))
    out, wide = Terminal(), mock.patch.dict(os.environ, COLUMNS=str(PAGE_WIDTH))
    with contextlib.redirect_stdout(out), wide:
        if name != "xquant" or run_xquant(words):
            raise ValueError(f"cannot show what '{command}' prints")
    return "".join(f"{line.rstrip()}\n" for line in click.unstyle(out.getvalue()).splitlines())


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail where a table is out of date.")
def main(check: bool) -> None:
    """Write the tables of README.md and docs/, and what commands print."""
    stale = []
    for page in PAGES:
        text = page.read_text()
        if (now := filled(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(now)
    for name in stale:
        click.echo(f"{name}: {'its tables are not what the results say' if check else 'written'}")
    if check and stale:
        click.echo("Run: python benchmarks/tables.py", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

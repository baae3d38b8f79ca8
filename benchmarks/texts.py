"""The texts that qualities are measured on: WikiText-2 and C4, which are given, and Python source.

The source is that of packages as they are installed, which nobody chose anything on.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from xquant.text import read_text

PACKAGES = "click", "rich"

WIKITEXT, C4, SOURCE = "WikiText-2", "C4", "Python source"

with_wikitext: Callable[[Any], Any] = click.option(
    "--wikitext", required=True, help="The test text of WikiText-2."
)
with_c4: Callable[[Any], Any] = click.option("--c4", required=True, help="Passages of C4, a .jsonl file.")


def texts(c4: str, wikitext: str | None = None) -> dict[str, str]:
    """The texts by name, those of the files and the source."""
    given = {} if wikitext is None else {WIKITEXT: read_text(wikitext)}
    return {**given, C4: read_text(c4), SOURCE: source()}


def source() -> str:
    """The Python files of the packages, one after the other."""
    files: list[Path] = []
    for name in PACKAGES:
        files += sorted(folder_of(name).glob("*.py"))
    return "\n\n".join(file.read_text() for file in files)


def folder_of(package: str) -> Path:
    """Where an installed package lies."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def source_versions() -> dict[str, str]:
    """Of the packages, which the source depends on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}

"""``xquant methods``: what there is to choose from."""

from typing import TYPE_CHECKING

import click

from ..results.rows import STDOUT
from .common import finish, json_option, print_table

if TYPE_CHECKING:
    from ..methods import Method


@click.command()
@json_option
def methods(json_file: str | None) -> None:
    """List the methods, their papers and their options."""
    from .. import parse_method
    from ..methods import METHODS

    def calibrated(method: "type[Method]") -> bool:
        return parse_method(method.example).needs_calibration

    rows = [
        {
            "name": name,
            "spec": method.example,
            "paper": method.paper,
            "needs_calibration": calibrated(method),
            "summary": method.summary,
            "options": method.option_help(),
        }
        for name, method in METHODS.items()
    ]
    finish(rows, json_file)
    if json_file == STDOUT:
        return
    print_table(
        {"write it as": "left", "what it stores": "left", "paper": "left", "calibration": "left"},
        [
            (m.example, m.summary, m.paper, "needed" if calibrated(m) else "none")
            for m in METHODS.values()
        ],
    )
    users: dict[tuple[str, str], list[str]] = {}
    for name, method in METHODS.items():
        for option in method.option_help().items():
            users.setdefault(option, []).append(name)
    click.echo("\nOptions follow a colon, as in xquant-cl-2bit:sink=1,tail=64")
    print_table(
        {"option": "left", "meaning": "left", "methods": "left"},
        [
            (option, meaning, "all" if len(names) == len(METHODS) else ", ".join(names))
            for (option, meaning), names in users.items()
        ],
    )

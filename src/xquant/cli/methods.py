"""``xquant methods``: what there is to choose from."""

from typing import TYPE_CHECKING

import click

from ..results import STDOUT
from .common import finish, json_option, print_table

if TYPE_CHECKING:
    from ..methods import Method

FROM_A_TEXT, ITS_OWN, NONE = "from a text", "its own", "none"


@click.command()
@json_option
def methods(json_file: str | None) -> None:
    """List the methods, their papers and their options."""
    from ..methods import METHODS, find_installed

    find_installed()
    rows = [
        {
            "name": name,
            "spec": method.example,
            "paper": method.paper,
            "needs_calibration": _calibration(method) != NONE,
            "calibration": _calibration(method),
            "uncalibrated": method.uncalibrated,
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
        [(m.example, m.summary, m.paper, _calibration(m)) for m in METHODS.values()],
    )
    _explain(list(METHODS.values()))
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


def _calibration(method: "type[Method]") -> str:
    """Where the calibration of a method comes from, as it is written by default."""
    from ..spec import parse_method

    if not parse_method(method.example).needs_calibration:
        return NONE
    return ITS_OWN if method.calibrates_itself else FROM_A_TEXT


def _explain(methods: "list[type[Method]]") -> None:
    """What the column on calibration means."""
    without = ", ".join(f"{m.name} with {m.uncalibrated}" for m in methods if m.uncalibrated)
    click.echo(
        f"\nCalibration {FROM_A_TEXT}: 'xquant calibrate' makes it, for --calibration FILE; {without} needs"
        f" {NONE}.\n{ITS_OWN.capitalize()}: commands make it when they first meet a model, in minutes, and"
        " keep it; in Python xquant.own_calibration does."
    )

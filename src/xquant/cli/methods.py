"""``xquant methods``: what there is to choose from."""

from collections.abc import Iterable

import click

from ..catalogue import FROM_A_TEXT, ITS_OWN, NONE, Entry, brought
from ..results import STDOUT
from .common import finish, json_option, known_methods
from .tables import print_table, say, wide_option


@click.command()
@wide_option
@json_option
def methods(json_file: str | None) -> None:
    """List the methods, their papers and their options."""
    known = known_methods().values()
    rows = [
        {
            "name": method.name,
            "spec": method.example,
            "paper": method.paper,
            "needs_calibration": method.calibration != NONE,
            "calibration": method.calibration,
            "uncalibrated": method.uncalibrated,
            "summary": method.summary,
            "options": method.option_help(),
        }
        for method in known
    ]
    finish(rows, json_file)
    if json_file == STDOUT:
        return
    print_table(
        {"write it as": "left", "what it stores": "text", "paper": "text", "calibration": "left"},
        [(m.example, m.summary, m.paper, m.calibration) for m in known],
        extra=("paper",),
    )
    others = [f"{name} ({whose})" for name, whose in brought().items()]
    if others:
        say(f"\nOther distributions bring {', '.join(others)}.")
    _explain(known)
    users: dict[tuple[str, str], list[str]] = {}
    for method in known:
        for option in method.option_help().items():
            users.setdefault(option, []).append(method.name)
    click.echo("\nOptions follow a colon, as in xquant-cl-2bit:sink=1,tail=64")
    print_table(
        {"option": "left", "meaning": "text", "methods": "text"},
        [
            (option, meaning, "all" if len(names) == len(known) else ", ".join(names))
            for (option, meaning), names in users.items()
        ],
    )


def _explain(methods: Iterable[Entry]) -> None:
    """What the column on calibration means."""
    without = ", ".join(f"{m.name} with {m.uncalibrated}" for m in methods if m.uncalibrated)
    say(
        f"\nCalibration {FROM_A_TEXT}: 'xquant calibrate' makes it, for --calibration FILE; {without} needs"
        f" {NONE}.\n{ITS_OWN.capitalize()}: commands make it when they first meet a model, in minutes, and"
        " keep it; in Python xquant.own_calibration does."
    )

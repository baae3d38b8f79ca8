"""``xquant compare``: methods beside each other, as a table, a picture and a page."""

from pathlib import Path
from typing import Any

import click

from ..evals.results import STDOUT, write_json
from ..evals.text import HELP_TOPICS
from ..files import write_atomically
from .common import (
    calibrations_option,
    check_file,
    check_folder,
    finish,
    json_option,
    load_calibrations,
    methods_option,
    model_options,
    text_options,
)
from .perplexity import print_rows, run

BASELINE = "full"
DEFAULT_METHODS = (
    "xquant-4bit",
    "xquant-3bit",
    "xquant-2bit",
    "xquant-cl-3bit",
    "xquant-cl-2bit",
    "kivi-4bit",
    "kivi-2bit",
    "crosslayer",
)


@click.command()
@model_options
@methods_option
@text_options(default=HELP_TOPICS)
@calibrations_option
@click.option(
    "--output", metavar="DIR", required=True, help="Folder of the files; made if missing."
)
@json_option
def compare(output: str, specs: tuple[str, ...], json_file: str | None, **asked: Any) -> None:
    """Compare methods on MODEL: perplexity against the size of the cache.

    Writes results.json, report.html, perplexity.svg and perplexity.png into --output. The full cache
    is always the first row; without --method a selection follows it, and the method of every
    --calibration.
    """
    # Imported before the long work, so that a missing package is told of at once.
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401

    from ..evals.page import render_page
    from ..evals.plots import perplexity_figure

    check_file(json_file)
    check_folder(output)
    if not specs:
        calibrated = (made.method for made in load_calibrations(asked["artifacts"]))
        specs = (*DEFAULT_METHODS, *calibrated)
    rows, subject = run(specs=(BASELINE, *specs), **asked)
    rows = finish(rows, json_file, **subject)
    svg, png = perplexity_figure(rows)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", rows)
    write_atomically(folder / "perplexity.svg", svg)
    write_atomically(folder / "perplexity.png", png)
    write_atomically(folder / "report.html", render_page(rows, svg))
    if json_file != STDOUT:
        print_rows(rows)
        click.echo(f"\n{folder / 'report.html'}")

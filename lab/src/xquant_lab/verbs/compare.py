"""``xquant compare``: methods beside each other, as a table, a picture and a page."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xquant.cli.common import (
    IN_FILE,
    OUT_FOLDER,
    calibrations_option,
    chosen,
    finish,
    json_option,
    methods_option,
    model_options,
    resume_option,
    text_options,
)
from xquant.cli.tables import print_table, say, wide_option
from xquant.files import write_atomically
from xquant.results import STDOUT, write_json
from xquant.text import HELP_TOPICS

from ..results.read import read_results
from .asked import Asked, attend_option
from .perplexity import print_rows, run

if TYPE_CHECKING:
    from ..results.diff import Change

BASELINE = "full"
COLUMNS = {
    "method": "left",
    "perplexity earlier": "right",
    "now": "right",
    "change, nats a token": "right",
    "std. error": "right",
    "MB earlier": "right",
    "MB now": "right",
    "seconds earlier": "right",
    "seconds now": "right",
}


@click.command()
@model_options
@methods_option
@text_options(default=HELP_TOPICS)
@attend_option("How the text is read")
@calibrations_option
@click.option(
    "--bench",
    "bench_files",
    metavar="FILE",
    type=IN_FILE,
    multiple=True,
    help="Show these results of 'xquant bench --json' too; may be given several times.",
)
@click.option(
    "--eval",
    "eval_files",
    metavar="FILE",
    type=IN_FILE,
    multiple=True,
    help="Show these results of 'xquant eval --json' too; may be given several times.",
)
@click.option(
    "--against",
    metavar="FILE",
    type=IN_FILE,
    help="Compare with an earlier run: its results.json.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=OUT_FOLDER,
    required=True,
    help="Folder of the files; made if missing.",
)
@resume_option()
@wide_option
@json_option
def compare(
    output: str,
    specs: tuple[str, ...],
    text: str,
    context: int,
    windows: int,
    attend: str,
    bench_files: Sequence[str],
    eval_files: Sequence[str],
    against: str | None,
    json_file: str | None,
    **asked: Any,
) -> None:
    """Compare methods on MODEL: what a cache loses against its size.

    Writes results.json, report.html and the pictures into --output: perplexity.svg and .png, with
    --bench also speed.svg and .png. The full cache is always the first row; without --method the
    recommended ones follow it, and the method of every --calibration. Methods are judged by KL, the
    divergence of predictions from the full cache's. Perplexity would be a worse judge: by chance it may
    even fall.
    """
    # Imported before the long work, so that a missing package is reported at once.
    import_module("jinja2")
    import_module("matplotlib")

    from ..results import diff, page
    from ..results.front import verdict
    from ..results.plots import as_png, as_svg, loss_figure, speed_figure, timed

    bench = [row for file in bench_files for row in read_results(file, *page.BENCH_FIELDS)]
    bench = [row for row in bench if row["speedup_vs_full"] is not None]  # what failed is not shown
    tasks = [row for file in eval_files for row in read_results(file, *page.TASK_FIELDS)]
    earlier = read_results(against, *diff.FIELDS) if against else []
    specs = chosen(specs, asked["artifacts"])
    rows, subject = run(Asked(**asked), (BASELINE, *specs), text, context, windows, attend)
    rows = finish(rows, json_file, **subject)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", rows)
    figures = {"perplexity": loss_figure(rows)}
    if timed(bench):
        figures["speed"] = speed_figure(bench)
    for name, figure in figures.items():
        write_atomically(folder / f"{name}.svg", as_svg(figure))
        write_atomically(folder / f"{name}.png", as_png(figure))
    write_atomically(folder / "report.html", page.render_page(rows, bench, tasks, earlier))
    if json_file != STDOUT:
        print_rows(rows)
        say("\n" + verdict(rows).replace("`", ""))
        if against:
            click.echo(f"\nAgainst {against}:")
            print_changes(diff.changes(rows, earlier))
        click.echo(f"\n{folder / 'report.html'}")


def print_changes(changes: "Sequence[Change]") -> None:
    """The table of two runs on standard output."""

    def show(number: float | None, form: str) -> str:
        return "" if number is None else format(number, form)

    print_table(
        COLUMNS,
        [
            (
                change.method,
                *(show(row["perplexity"], ".3f") for row in (change.earlier, change.now)),
                show(change.difference, "+.4f"),
                show(change.error, ".4f"),
                *(f"{row['cache_bytes'] / 1e6:.2f}" for row in (change.earlier, change.now)),
                *(f"{row['seconds']:.1f}" for row in (change.earlier, change.now)),
            )
            for change in changes
        ],
        extra=("seconds earlier", "seconds now", "MB earlier", "MB now"),
    )

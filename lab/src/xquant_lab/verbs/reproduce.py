"""``xquant reproduce``: a table or figure of a paper measured again, beside what the paper prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xquant.cli.common import (
    DTYPES,
    IN_FILE,
    MODEL,
    OUT_FOLDER,
    calibrations_option,
    finish,
    json_option,
    load_calibrations,
    resume_option,
    text_options,
)
from xquant.cli.progress import progress
from xquant.cli.tables import print_table, say, wide_option
from xquant.files import write_atomically
from xquant.results import STDOUT, write_json

from ..reproduce import check_id
from .asked import Asked

if TYPE_CHECKING:
    from ..reproduce.experiment import Experiment


@dataclass(frozen=True)
class Sources:
    """What an experiment reads besides the model: each a path, or None where it was not given."""

    text: str | None = None
    """The text to measure on."""
    data: str | None = None
    """The folder of the tasks' data."""
    calibration_text: str | None = None
    """The text to calibrate on, for methods without a calibration at hand."""


@click.command()
@click.argument("name", metavar="[ID]", required=False)
@click.argument("model", required=False, type=MODEL)
@click.option("--list", "listing", is_flag=True, help="List the experiments instead.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of the weights.",
)
@click.option("--device", help="Such as cpu or cuda:1.  [default: cuda where there is one]")
@text_options(help="Text to measure on, for the experiments that need one.")
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(exists=True),
    help="Folder of the tasks' data, where tasks are run.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="NAME",
    help="Run this task of the table; may be given several times.  [default: all of them]",
)
@click.option("--limit", type=click.IntRange(1), help="Rows of a task.  [default: all]")
@click.option(
    "--answer",
    type=click.IntRange(1),
    help="Tokens of an answer at most.  [default: as the task has it]",
)
@click.option(
    "--calibration-text",
    metavar="FILE",
    type=IN_FILE,
    help="For methods that need a calibration; without it MODEL writes the text itself.",
)
@click.option(
    "--calibration-windows",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Windows of that text.",
)
@calibrations_option
@resume_option()
@click.option(
    "--output",
    metavar="DIR",
    type=OUT_FOLDER,
    help="Folder for the rows and the pictures; made if missing.",
)
@wide_option
@json_option
def reproduce(
    name: str | None,
    model: str | None,
    listing: bool,
    dtype: str,
    device: str | None,
    text: str | None,
    data: str | None,
    tasks: Sequence[str],
    calibration_text: str | None,
    artifacts: Sequence[str],
    resume: str | None,
    output: str | None,
    json_file: str | None,
    **size: Any,
) -> None:
    """Measure a table or figure of a paper on MODEL, and put the paper's own figures beside it.

    ID is one of those that --list shows, such as xquant/table1. Methods that need a calibration are
    calibrated first, unless --calibration gives it.
    """
    if listing:
        show_list(json_file)
        return
    if name is None or model is None:
        raise ValueError("give the ID of an experiment and a MODEL; --list shows the experiments")
    asked = Asked(model, dtype, device, artifacts, resume)
    run(name, asked, Sources(text, data, calibration_text), tasks, size, output, json_file)


def run(
    name: str,
    asked: Asked,
    sources: Sources,
    tasks: Sequence[str],
    size: Mapping[str, Any],
    output: str | None,
    json_file: str | None,
) -> None:
    """Run the experiment of that id: print, write what was asked for. ``size`` has fields of `Setup`."""
    from xquant.text import read_text, text_name

    # Before torch is imported.
    check_id(name)
    texts = sources.text, sources.calibration_text
    words, calibration_words = (file and read_text(file) for file in texts)
    from ..reproduce.experiments import EXPERIMENTS
    from ..reproduce.setup import Setup

    experiment = EXPERIMENTS[name]
    printed = chosen(experiment, tasks)
    check_needs(experiment, sources, asked.artifacts)
    if output is not None and experiment.draw is not None:
        import_module("matplotlib")  # a missing package is reported at once
    calibrations = load_calibrations(asked.artifacts)
    network, tokenizer = asked.load()
    with progress(f"measuring {experiment.id}") as show:
        setup = Setup(
            network,
            tokenizer,
            words,
            data=None if sources.data is None else Path(sources.data),
            calibration_text=calibration_words,
            calibration_name=text_name(sources.calibration_text or ""),
            calibrations=calibrations,
            resume=None if asked.resume is None else Path(asked.resume),
            progress=show,
            **size,
        )
        rows = experiment.run(setup, printed)
    subject = {
        "experiment": experiment.id,
        "source": experiment.paper,
        "model": asked.model,
        "text": None if sources.text is None else text_name(sources.text),
        "data": None if sources.data is None else Path(sources.data).name,
        "tasks": list(tasks) or None,
        "size": size,
        "dtype": asked.dtype,
        "device": str(network.device),
        "calibrations": {made.method: made.text for made in setup.calibrations},
    }
    rows = finish(rows, json_file, **subject)
    if output is not None:
        write_files(experiment, rows, Path(output))
    if json_file != STDOUT:
        print_rows(experiment, rows)


def check_needs(experiment: "Experiment", sources: Sources, artifacts: Sequence[str]) -> None:
    """Raise ValueError unless the experiment is given what it needs, or the hub can be asked for it."""
    if experiment.needs == "text" and sources.text is None:
        raise ValueError(
            f"{experiment.id} is measured on a text: give --text FILE, which is UTF-8, .jsonl with"
            ' "text" fields, or WikiText\'s .raw'
        )
    if experiment.calibration_text and not (sources.calibration_text or artifacts):
        raise ValueError(
            f"{experiment.id} compares texts to calibrate on: give --calibration-text FILE, beside which"
            " the model writes one"
        )
    if experiment.needs != "data":
        return
    from huggingface_hub import constants

    from xquant.hub import hub_answers

    # Told to stay offline, the hub's client takes what it has kept.
    if sources.data is None and not constants.HF_HUB_OFFLINE and not hub_answers():
        raise ValueError(
            f"{experiment.id} runs tasks, and the hub, which has their data, cannot be reached: give --data"
            " DIR, a folder with the data"
        )
    import_module("lm_eval")  # a missing package is reported at once


def chosen(experiment: "Experiment", tasks: Sequence[str]) -> list[dict[str, Any]]:
    """The printed rows of these tasks, and of averages; of all tasks where none is named.

    Raises:
        ValueError: the experiment has no such task.
    """
    from ..reproduce.experiment import AVERAGE

    rows = experiment.printed
    known = dict.fromkeys(row["task"] for row in rows if row.get("task", AVERAGE) != AVERAGE)
    unknown = next((task for task in tasks if task not in known), None)
    if unknown is not None:
        there = f"its tasks are {', '.join(known)}" if known else "it runs no tasks"
        raise ValueError(f"{experiment.id} has no task '{unknown}': {there}")
    return [row for row in rows if not tasks or row["task"] in (*tasks, AVERAGE)]


def write_files(experiment: "Experiment", rows: list[dict[str, Any]], folder: Path) -> None:
    """The rows as ``<id>.json``, and each picture as ``<id>-<name>.svg`` and ``.png``."""
    from ..results.plots import as_png, as_svg

    folder.mkdir(parents=True, exist_ok=True)
    stem = experiment.id.replace("/", "-")
    write_json(folder / f"{stem}.json", rows)
    if experiment.draw is None:
        return
    for name, figure in experiment.draw(rows).items():
        write_atomically(folder / f"{stem}-{name}.svg", as_svg(figure))
        write_atomically(folder / f"{stem}-{name}.png", as_png(figure))


def show_list(json_file: str | None) -> None:
    """What there is to choose from."""
    from ..reproduce.experiments import EXPERIMENTS

    rows: list[dict[str, Any]] = [
        {
            "id": name,
            "title": experiment.title,
            "paper": experiment.paper,
            "needs": experiment.needs,
            "calibrates": experiment.calibrates,
        }
        for name, experiment in EXPERIMENTS.items()
    ]
    finish(rows, json_file)
    if json_file != STDOUT:
        columns = ("id", "what it shows", "paper", "needs", "calibration")
        print_table(
            {**dict.fromkeys(columns, "text"), "id": "left"},
            [
                (
                    row["id"],
                    row["title"],
                    row["paper"],
                    row["needs"] or "nothing",
                    "of a method" if row["calibrates"] else "",
                )
                for row in rows
            ],
            extra=("calibration", "paper"),
        )


def print_rows(experiment: "Experiment", rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of each metric that the paper prints, its values beside the measured ones, and one of all
    other metrics."""
    keys = dict.fromkeys(experiment.keys, "left")
    others = []
    for metric in experiment.metrics:
        shown = [row for row in rows if metric in row.get("paper", {})]
        places = list(dict.fromkeys(place for row in shown for place in row["paper"][metric]))
        if not shown:
            others.append(metric)
            continue
        say(f"{metric}, as measured and as in {experiment.paper}")
        print_table(
            {**keys, "measured": "right", **dict.fromkeys(places, "right")},
            [
                [_plain(value) for value in (*(row[key] for key in keys), row[metric])]
                + [_plain(row["paper"][metric].get(place)) for place in places]
                for row in shown
            ],
        )
        click.echo()
    if others:
        columns = {**keys, **dict.fromkeys(others, "right")}
        print_table(columns, [[_plain(row[name]) for name in columns] for row in rows])


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

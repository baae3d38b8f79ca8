"""An experiment of a paper: what was measured beside what the paper prints, as Markdown.

What is shown follows from the experiment's own fields and from those of its rows.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from xquant_lab.reproduce.experiment import AVERAGE, Experiment

from .columns import ONE_EACH, columns, number, printed_for, text_of
from .common import RESULTS, Row, code, markdown

FOLDER = RESULTS / "reproduce"
FIGURES = "lab/src/xquant_lab/reproduce/figures"
IMAGES = "images/papers"
"""In docs/."""
UP = "../../"
"""From docs/papers/ to the repository's root."""
NOTHING = "There is no results file.\n"


def results(experiment: Experiment) -> list[Path]:
    """Its results files: that of SmolLM2 first, then those of other forms of it."""
    stem = experiment.id.replace("/", "-")
    files = (FOLDER / f"{stem}.json", *sorted(FOLDER.glob(f"{stem}-*.json")))
    return [file for file in files if file.exists()]


def read(file: Path) -> list[Row]:
    rows: list[Row] = json.loads(file.read_text())
    return rows


def pictures(experiment: Experiment, file: Path) -> Mapping[str, Any]:
    """What the experiment draws of a results file, by the names that `picture` wants."""
    return experiment.draw(read(file)) if experiment.draw else {}


def picture(file: Path, name: str) -> str:
    """The file of a picture of a results file."""
    return f"{file.stem}-{name}.svg"


def beside(experiment: Experiment) -> str:
    """All that was measured of an experiment: of each results file a table, its source, and pictures."""
    files = results(experiment)
    parts = []
    for file in files:
        rows = read(file)
        if len(files) > 1:
            subject = filter(None, (code(rows[0]["model"]), text_of(rows[0])))
            parts.append(f"On {', '.join(subject)}:\n")
        make = by_layer if "layer" in experiment.keys else by_row
        parts += [make(experiment, rows), source(file, rows[0])]
        for name in pictures(experiment, file):
            words = f"{experiment.title}: {name.replace('_', ' ')}"
            parts.append(f"![{words}](../{IMAGES}/{picture(file, name)})\n")
    if files and experiment.printed:
        link = f"[all that the paper prints]({UP}{FIGURES}/{experiment.id.partition('/')[0]}.toml)"
        parts.append(f"{code(f'xquant reproduce {experiment.id} MODEL')} shows {link}.\n")
    return "\n".join(parts) or NOTHING


def source(file: Path, row: Row) -> str:
    """The line that says where the figures come from."""
    made = row["environment"]
    commit, _, changed = made["commit"].partition("-")
    commit = commit[:8] + (" with changes" if changed else "")
    threads = f"{made['threads']} thread" + ("" if made["threads"] == 1 else "s")
    machine = f"{made['cpu']}, {threads}" if row["device"] == "cpu" else made["gpu"]
    versions = ", ".join(f"{name} {made[name]}" for name in ("torch", "transformers"))
    link = f"[{file.name}]({UP}{file.relative_to(RESULTS.parent.parent)})"
    return (
        f"Measured by {code(made['command'])}: xquant {made['xquant']} at {commit}, {versions},"
        f" {row['dtype']}, {machine}. Results: {link}.\n"
    )


def by_row(experiment: Experiment, rows: Sequence[Row]) -> str:
    """The table of the rows, those of a method's tasks in one, and what it leaves out."""
    tasks = dict.fromkeys(row["task"] for row in rows if row.get("task", AVERAGE) != AVERAGE)
    shown = averaged(experiment, rows) if tasks else list(rows)
    made = columns(experiment, rows, shown)
    notes = []
    if tasks and "task" not in shown[0]:
        names = ", ".join(map(code, tasks))
        what = f"Means over {len(tasks)} tasks:" if len(tasks) > 1 else "The task is"
        notes.append(f"{what} {names}.")
    counts = {row.get("n") for row in shown}
    if len(counts) > 1:
        made.append(("rows", lambda row: number(row.get("n"))))
    elif counts != {None}:
        notes.append(f"Each row stands for {number(counts.pop())} prompts.")
    body = ([cell(row) for _, cell in made] for row in shown)
    table = markdown([head for head, _ in made], body)
    return f"{table}\n{' '.join(notes)}\n" if notes else table


def averaged(experiment: Experiment, rows: Sequence[Row]) -> list[Row]:
    """A row for each method with the means over its tasks. Where methods have other tasks than each other,
    the rows as they are."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in experiment.keys if name != "task")
        groups.setdefault(key, []).append(row)
    if len({frozenset(row["task"] for row in group) - {AVERAGE} for group in groups.values()}) > 1:
        return [row for row in rows if row["task"] != AVERAGE]
    return [mean_of(experiment, group) for group in groups.values()]


def mean_of(experiment: Experiment, group: Sequence[Row]) -> Row:
    """The mean over the tasks of a method, beside the paper's own average where it prints one."""
    own = [row for row in group if row["task"] != AVERAGE]
    numbers = [name for name, value in own[0].items() if isinstance(value, int | float)]
    specs = {row.get("run_as", row["method"]) for row in own}
    return {
        **{name: value for name, value in own[0].items() if name != "task"},
        **{name: fmean(row[name] for row in own) for name in numbers},
        "n": sum(row["n"] for row in own),
        "run_as": specs.pop() if len(specs) == 1 else ONE_EACH,
        "paper": {metric: printed_means(group, metric) for metric in experiment.metrics},
    }


def printed_means(group: Sequence[Row], metric: str) -> dict[str, float]:
    """The paper's average over the tasks of a method. Without one it is computed from what the paper prints,
    if that is of all tasks, or the same for each."""
    found = {}
    tasks = {row["task"] for row in group} - {AVERAGE}
    for where in printed_for(group, metric):
        values = {row["task"]: row["paper"].get(metric, {}).get(where) for row in group}
        known = {task: value for task, value in values.items() if value is not None}
        if AVERAGE in known:
            found[where] = known[AVERAGE]
        elif known.keys() == tasks:
            found[where] = round(fmean(known.values()), 4)
        elif len(set(known.values())) == 1 and metric != "score":
            found[where] = next(iter(known.values()))
    return found


def by_layer(experiment: Experiment, rows: Sequence[Row]) -> str:
    """The lowest, the middle and the highest value of each metric over the layers; of whole numbers, such as
    channels, the most frequent."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = ", ".join(str(row[key]) for key in experiment.keys if key != "layer")
        groups.setdefault(name, []).append(row)
    body, frequent = [], []
    for metric in experiment.metrics:
        for name, group in groups.items():
            values = [row[metric] for row in group]
            if all(isinstance(value, int) for value in values):
                most = max(values, key=values.count)
                often = f"{values.count(most)} of {len(values)} layers"
                frequent.append(f"{code(metric)} of {name} is most often {most} ({often}).")
                continue
            cells = (
                f"{number(value)} (layer {group[values.index(value)]['layer']})"
                for value in (min(values), median_low(values), max(values))
            )
            body.append([code(metric), name, *cells])
    table = markdown(["metric", "of", "lowest", "median", "highest"], body)
    return f"{table}\n{' '.join(frequent)}\n" if frequent else table

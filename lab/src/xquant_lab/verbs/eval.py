"""``xquant eval``: tasks of lm-evaluation-harness, and passkey retrieval, with compressed caches."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xquant.cli.common import (
    calibrations_for,
    calibrations_option,
    chosen,
    json_option,
    methods_option,
    model_options,
    own_calibrations,
    resume_option,
)
from xquant.cli.progress import progress
from xquant.cli.tables import print_table, wide_option

from .asked import Asked, Rows, attend_option, end

if TYPE_CHECKING:
    from ..evals.passkey import PasskeyRow

BASELINE = "full"
PASSKEY = "passkey"
COLUMNS = {
    "method": "left",
    "task": "left",
    "metric": "left",
    "value": "right",
    "std. error": "right",
    "rows": "right",
    "as full": "right",
    "seconds": "right",
}


@click.command("eval")
@model_options
@methods_option
@click.option(
    "--task",
    "names",
    metavar="NAME",
    multiple=True,
    help="passkey, gsm8k, truthfulqa_gen, longbench_hotpotqa, niah_single_1, or any other task or group of"
    " lm-eval; may be given several times.",
)
@click.option(
    "--data",
    metavar="PATH",
    type=click.Path(exists=True),
    help="File or folder of the tasks' data.  [default: the hub]",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="First rows of a task; of passkey, prompts of a context in all.  [default: all; 20 of passkey]",
)
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Rows at a time.")
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(1),
    multiple=True,
    help="Tokens of the prompts of passkey and RULER; may be given several times."
    "  [default: 1024, 2048 and 4096 for passkey, 4096 for RULER]",
)
@attend_option("How the prompts of passkey are read")
@calibrations_option
@resume_option()
@wide_option
@json_option
def evaluate(
    specs: Sequence[str],
    names: Sequence[str],
    data: str | None,
    limit: int | None,
    batch_size: int,
    contexts: Sequence[int],
    attend: str,
    json_file: str | None,
    **asked: Any,
) -> None:
    """Run tasks on MODEL with the cache compressed by each method, and with the full cache.

    Prompts and metrics are those of lm-evaluation-harness. Beside its scores stands how many rows were
    answered as with the full cache.
    """
    if not names:
        raise ValueError("no task to run: give --task NAME")
    specs = chosen(specs, asked["artifacts"])
    found = run(Asked(**asked), specs, names, data, limit, batch_size, contexts, attend)
    end(*found, json_file, print_rows)


def run(
    asked: Asked,
    specs: Sequence[str],
    names: Sequence[str],
    data: str | None,
    limit: int | None,
    batch_size: int,
    contexts: Sequence[int],
    attend: str,
) -> tuple[Rows, dict[str, Any]]:
    """The measurement: rows, and what they were measured on."""
    from importlib.metadata import version

    from xquant import parse_method

    methods = list(dict.fromkeys(map(parse_method, (BASELINE, *specs))))
    calibrations = calibrations_for(methods, asked.artifacts)
    ours, theirs = PASSKEY in names, [name for name in names if name != PASSKEY]
    tasks: list[Any] = []
    if theirs:
        # And with them lm-eval, which passkey does without.
        from ..evals.task_lookup import find_tasks
        from ..evals.tasks import Settings
        from ..evals.tasks import evaluate as run_tasks

        tasks = find_tasks(theirs, data, contexts)
    from xquant.runs import Runs, identity

    from ..evals.journal import Journal
    from ..evals.passkey import Prompts, passkey

    network, tokenizer = asked.load()
    calibrations = own_calibrations(network, tokenizer, methods, calibrations)
    subject = {
        "model": asked.model,
        "dtype": asked.dtype,
        "device": str(network.device),
        "limit": limit,
        "batch_size": batch_size,
        "data": None if data is None else Path(data).name,
        "lm_eval": version("lm_eval") if theirs else None,
        "calibrations": {made.method: made.text for made in calibrations},
    }
    runs = Runs(asked.resume, {**subject, "identity": identity(network, "", calibrations)})
    rows: Rows = []
    with progress("running tasks") as show:
        journal = Journal(runs, show)
        if ours:
            sizes: dict[str, Any] = {"contexts": contexts} if contexts else {}
            prompts = Prompts(**sizes, limit=limit)
            found = passkey(network, tokenizer, methods, prompts, attend, calibrations, journal)
            rows += map(_passkey_row, found)
        if theirs:
            settings = Settings(limit, batch_size)
            scored = run_tasks(network, tokenizer, methods, tasks, settings, calibrations, journal)
            rows += [row.to_dict() for row in scored]
    return rows, subject


def _passkey_row(row: "PasskeyRow") -> dict[str, Any]:
    share, samples = row.found / row.samples, row.samples
    return {
        **row.to_dict(),
        "task": PASSKEY,
        "metric": "found",
        "value": share,
        "stderr": math.sqrt(share * (1 - share) / (samples - 1)) if samples > 1 else None,
        "n": samples,
        "agreement": None,
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table on standard output."""
    print_table(COLUMNS, map(_cells, rows), extra=("seconds", "std. error", "rows"))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    made_to = f" {row['context']}" if row["context"] else ""
    depth = f" at {row['depth']:g}" if "depth" in row else ""
    return (
        row["method"],
        f"{row['task']}{made_to}{depth}",
        row["metric"],
        f"{row['value']:.4f}",
        "" if row["stderr"] is None else f"{row['stderr']:.4f}",
        str(row["n"]),
        "" if row["agreement"] is None else f"{row['agreement']} of {row['n']}",
        f"{row['seconds']:.1f}",
    )

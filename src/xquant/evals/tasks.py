"""Tasks of lm-evaluation-harness with every cache compressed, beside the full cache on the same rows.

Prompts, lengths of answers and metrics are lm-eval's own; the model type is `harness.XQuantLM`. A small model
scores near zero on some tasks. There the number of rows that it answers as with the full cache tells methods
apart.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from lm_eval.api.model import CacheHook
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate as run_tasks

from ..calibration import Calibration
from ..calibrations import Calibrations
from ..methods import Full, Method
from ..positions import check_context
from ..progress import Progress, silent
from ..runs import Runs
from ..spec import parse_method
from .harness import XQuantLM
from .task_lookup import ReadyTask, quiet, seed

RESAMPLES = 1000
"""Resamples for the standard error of a metric that has no closed form of it."""


@dataclass(frozen=True)
class TaskRow:
    """One metric of one method on one task."""

    method: str
    task: str
    metric: str
    value: float
    stderr: float | None  # as lm-eval has it; None for one row, or a metric without
    n: int  # rows
    agreement: int | None  # rows answered as with the full cache; None where nothing is answered
    seconds: float  # of the task with this method
    lm_eval_task: str  # what was run, by lm-eval's name
    version: str  # of that task in lm-eval
    shots: int  # examples in a prompt
    context: int | None  # tokens of a prompt with its answer, where the task is made to a length

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def evaluate(
    model: Any,
    tokenizer: Any,
    methods: Sequence[str | Method],
    tasks: Sequence[ReadyTask],
    limit: int | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
    calibrations: Iterable[Calibration] = (),
    runs: Runs | None = None,
) -> list[TaskRow]:
    """Run tasks with the full cache first, then with each of ``methods``, on their first ``limit`` rows.

    Args:
        tasks: what `task_lookup.find_tasks` found.
        batch_size: rows at a time.
        calibrations: each goes to the methods that it was made for.
        runs: keeps every part that is finished, a task with a method, and has the parts of a run that was
            stopped.

    Returns:
        a row for every method, task and metric.

    Raises:
        ValueError: unknown method, a calibration that is missing, or a prompt that is longer than the model
            allows; all but the last are raised before the first task.
    """
    wanted = list(dict.fromkeys([Full(), *map(parse_method, methods)]))
    runs = runs or Runs(None, {})
    check_context(model, max((task.context or 0 for task in tasks), default=0))
    made, show = Calibrations(calibrations), progress or silent
    with quiet():
        models = {
            method: XQuantLM(
                model,
                method,
                made.of(method),
                tokenizer=tokenizer,
                batch_size=batch_size,
            )
            for method in wanted
        }
    rows: list[TaskRow] = []
    done, total = 0, len(tasks) * len(wanted)
    for task in tasks:
        built: list[Any] = []
        baseline: list[dict[str, Any]] = []
        for method, lm in models.items():
            name = f"{method.spec} {task.title} limit={limit} batch={batch_size} {task.digest}"
            parts = runs.load(name)
            if parts is None:
                tell = partial(show, done, total)
                tell(f"{method.spec}, {task.title}")
                built = built or task.build(tokenizer)
                lm.set_cache_hook(_Counter(f"{method.spec}, {task.title}", tell))
                parts = [_run(lm, each, limit) for each in built]
                runs.save(name, parts)
            baseline = baseline or parts
            for part, full in zip(parts, baseline, strict=True):
                rows += _rows(method, task, part, full)
            done += 1
    show(done, total, "")
    return rows


def _run(lm: XQuantLM, task: Any, limit: int | None) -> dict[str, Any]:
    """Run one of lm-eval's tasks with one method: its metrics, and its answers row by row."""
    seed()
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    name, started = task.task_name, time.perf_counter()
    try:
        # Its own resampling would start processes, in the middle of ours.
        with quiet(), patch.dict(os.environ, DISABLE_MULTIPROC="1"):
            results = run_tasks(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=RESAMPLES)
    except AssertionError as error:  # lm-eval refuses prompts and settings so
        raise ValueError(f"{name}: {error}") from error
    seconds, samples = time.perf_counter() - started, results["samples"][name]
    kept = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    return {
        "task": name,
        "metrics": _metrics(results["results"][name]),
        "answers": [_answer(task.OUTPUT_TYPE, sample["resps"]) for sample in kept],
        "seconds": seconds,
        "version": str(results["versions"][name]),
        "shots": int(results["n-shot"][name] or 0),
    }


def _metrics(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each ``"metric,filter"`` of lm-eval with its ``"metric_stderr,filter"``."""
    found = []
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = results.get(f"{metric}_stderr,{kind}")
        found.append(
            {
                "metric": metric if kind == "none" else key,
                "value": float(value),
                "stderr": float(error) if isinstance(error, int | float) else None,
            }
        )
    return found


def _answer(kind: str, responses: Sequence[Sequence[Any]]) -> str | int | bool | None:
    """The generated text, the number of the best choice, or whether the text is the greedy one."""
    if kind == "generate_until":
        return str(responses[0][0])
    if kind == "multiple_choice":
        likelihoods = [first[0] for first, *_ in responses]
        return likelihoods.index(max(likelihoods))
    return bool(responses[0][0][1]) if kind == "loglikelihood" else None


def _rows(
    method: Method, task: ReadyTask, part: Mapping[str, Any], full: Mapping[str, Any]
) -> list[TaskRow]:
    pairs = list(zip(part["answers"], full["answers"], strict=True))
    answered = any(answer is not None for answer, _ in pairs)
    return [
        TaskRow(
            method=method.spec,
            task=task.name if task.name == "gsm8k" else part["task"],
            **metric,
            n=len(pairs),
            agreement=sum(own == other for own, other in pairs) if answered else None,
            seconds=part["seconds"],
            lm_eval_task=part["task"],
            version=part["version"],
            shots=part["shots"],
            context=task.context,
        )
        for metric in part["metrics"]
        # RULER's tasks name -1 for the contexts they were not made to.
        if task.context is None or metric["metric"] == str(task.context)
    ]


class _Counter(CacheHook):
    """A cache hook of lm-eval, which is told of every finished request. It caches nothing and counts them."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        super().__init__(None)
        self._what, self._tell, self._count = what, tell, 0

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self._count += 1
        self._tell(f"{self._what}: {self._count} done")

"""Runs tasks of lm-evaluation-harness with the full cache and with compressed ones, on the same rows.

`xquant eval` and `xquant reproduce` call it, one run at a time: it seeds the process's generators and sets
an environment variable. Prompts, lengths of answers and metrics are lm-eval's own; the model type is
`harness.XQuantLM`. A small model scores near zero on some tasks. There methods are told apart by the number
of rows on which the answer is that of the full cache.
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

from xquant.calibration import Calibration
from xquant.calibrations import Calibrations
from xquant.methods import Full, Method
from xquant.positions import check_context
from xquant.spec import parse_method

from .agreement import Comparison, mean
from .harness import XQuantLM
from .journal import Journal
from .task_lookup import ReadyTask, quiet, seed

RESAMPLES = 1000
"""Resamples for the standard error of a metric that has no closed form of it."""


@dataclass(frozen=True)
class Settings:
    """How tasks are run: what a result depends on besides the model, the method and the task."""

    limit: int | None = None
    """Rows of each task, the first; None for all."""
    batch_size: int = 1
    """Rows at a time."""
    longest: int | None = None
    """Tokens of a prompt; of a longer one the end is read. None for as many as the model reads."""
    most: int | None = None
    """Tokens of an answer; None for as many as the task allows."""
    compare: bool = False
    """Also measure `agreement` on the prompts of answers. They are read one at a time, for all methods at
    once, so all the seconds are those of the full cache."""

    def __str__(self) -> str:
        """As the parts of a run are named, which a stopped run is found by."""
        return (
            f"limit={self.limit} batch={self.batch_size} longest={self.longest} most={self.most}"
            f" compare={self.compare}"
        )


@dataclass(frozen=True)
class TaskRow:
    """One metric of one method on one task."""

    method: str
    task: str
    metric: str
    value: float
    stderr: float | None  # as lm-eval has it; None for one row, or a metric without
    n: int  # rows
    agreement: int | None  # rows answered as with the full cache; None for tasks without answers
    kl: float | None  # of the predictions on prompts' last tokens from the full cache's, nats, if compared
    same_tokens: float | None  # of an answer, before the first that is not the full cache's, if compared
    seconds: float  # that `lm_eval_task` took with this method
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
    settings: Settings | None = None,
    calibrations: Iterable[Calibration] = (),
    journal: Journal | None = None,
) -> list[TaskRow]:
    """Run each task with the full cache first, then with each of ``methods``.

    Args:
        model, tokenizer: of transformers.
        tasks: what `task_lookup.find_tasks` found.
        settings: how much of them, and how; None for all of each, a row at a time.
        calibrations: each goes to the methods that it was made for.
        journal: keeps each task that a method has run, and reports them. The subject of its runs names the
            model and the calibrations.

    Returns:
        a row for every method, task and metric.

    Raises:
        ValueError: unknown method, a calibration that is missing, or tasks made to a length that is too long
            for the model, before the first task; a prompt or a setting that lm-eval refuses, when its task
            runs.
    """
    wanted = list(dict.fromkeys([Full(), *map(parse_method, methods)]))
    settings, journal = settings or Settings(), journal or Journal()
    check_context(model, max((task.context or 0 for task in tasks), default=0))
    made = Calibrations(calibrations)
    with quiet():
        models = {
            method: XQuantLM(
                model,
                method,
                made.of(method),
                tokenizer=tokenizer,
                batch_size=1 if settings.compare else settings.batch_size,
            )
            for method in wanted
        }
    for lm in models.values():
        lm.longest, lm.most = settings.longest, settings.most
    rows: list[TaskRow] = []
    done, total = 0, len(tasks) * len(wanted)
    for task in tasks:
        built: list[Any] = []
        comparisons: list[Comparison | None] = []
        baseline: list[dict[str, Any]] = []
        names = {method: f"{method.spec} {task.title} {settings} {task.digest}" for method in models}
        held = {method: journal.runs.load(name) for method, name in names.items()}
        left = [method for method, results in held.items() if results is None]
        if settings.compare and left:
            held[Full()] = None  # the others are compared with it
        for method, lm in models.items():
            results = held[method]
            if results is None:
                tell = partial(journal.tell, done, total)
                tell(f"{method.spec}, {task.title}")
                # A group is several tasks of lm-eval. They are built only if something is left to run.
                built = built or task.build(tokenizer)
                comparisons = comparisons or [
                    Comparison(model, left, made) if settings.compare else None for _ in built
                ]
                lm.set_cache_hook(_Counter(f"{method.spec}, {task.title}", tell))
                results = [_run(lm, *each, settings.limit) for each in zip(built, comparisons, strict=True)]
                journal.runs.save(names[method], results)
            baseline = baseline or results  # the full cache comes first
            for result, full in zip(results, baseline, strict=True):
                rows += _rows(method, task, result, full)
            done += 1
    journal.tell(done, total, "")
    return rows


def _run(lm: XQuantLM, task: Any, comparison: Comparison | None, limit: int | None) -> dict[str, Any]:
    """Run one of lm-eval's tasks with one method: its metrics, and its answers row by row."""
    lm.comparison = comparison
    seed()
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    name, started = task.task_name, time.perf_counter()
    try:
        # lm-eval's resampling would start processes, and this one holds a model and threads.
        with quiet(), patch.dict(os.environ, DISABLE_MULTIPROC="1"):
            results = run_tasks(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=RESAMPLES)
    except AssertionError as error:  # so lm-eval refuses a prompt or a setting
        raise ValueError(f"{name}: {error}") from error
    seconds, samples = time.perf_counter() - started, results["samples"][name]
    # lm-eval lists a row once for each filter of its answer; the answer itself is the same.
    kept = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    compared = comparison and comparison.found[lm.method]
    return {
        "task": name,
        "metrics": _metrics(results["results"][name]),
        "answers": [_answer(task.OUTPUT_TYPE, sample["resps"]) for sample in kept],
        "compared": asdict(mean(compared)) if compared else {"kl": None, "same_tokens": None},
        "seconds": seconds,
        "version": str(results["versions"][name]),
        "shots": int(results["n-shot"][name] or 0),
    }


def _metrics(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each ``"metric,filter"`` of lm-eval with its ``"metric_stderr,filter"``. A filter is named unless it is
    ``none``."""
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
    """What a row was answered: the generated text, the index of the likeliest choice, or whether the expected
    text is the greedy one. None for other kinds of tasks.

    Args:
        responses: of each request of the row, a list that begins with a text or (log-likelihood, is greedy).
    """
    if kind == "generate_until":
        return str(responses[0][0])
    if kind == "multiple_choice":
        likelihoods = [first[0] for first, *_ in responses]
        return likelihoods.index(max(likelihoods))
    return bool(responses[0][0][1]) if kind == "loglikelihood" else None


def _rows(
    method: Method, task: ReadyTask, result: Mapping[str, Any], full: Mapping[str, Any]
) -> list[TaskRow]:
    """The rows of one result of `_run`; ``full`` is that of the full cache, of the same rows in order."""
    pairs = list(zip(result["answers"], full["answers"], strict=True))
    answered = any(answer is not None for answer, _ in pairs)
    return [
        TaskRow(
            method=method.spec,
            # With local data gsm8k is lm-eval's gsm8k_cot, and keeps the name that the user gave.
            task=task.name if task.name == "gsm8k" else result["task"],
            **metric,
            n=len(pairs),
            agreement=sum(own == other for own, other in pairs) if answered else None,
            **result["compared"],
            seconds=result["seconds"],
            lm_eval_task=result["task"],
            version=result["version"],
            shots=result["shots"],
            context=task.context,
        )
        for metric in result["metrics"]
        # A task of RULER has a metric for each of several lengths: -1 for those that it was not made to.
        if task.context is None or metric["metric"] == str(task.context)
    ]


class _Counter(CacheHook):
    """A cache hook of lm-eval, which is told of every finished request. It caches nothing and counts them."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        super().__init__(None)  # no database
        self._what, self._tell, self._count = what, tell, 0

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self._count += 1
        self._tell(f"{self._what}: {self._count} done")

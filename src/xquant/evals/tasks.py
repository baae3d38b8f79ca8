"""Tasks of lm-evaluation-harness with every cache compressed, beside the full cache on the same rows.

Prompts, lengths of answers and metrics are lm-eval's own; the model type is `harness.XQuantLM`. A small model
scores near zero on some tasks: there the rows answered as with the full cache tell methods apart.
"""

import contextlib
import difflib
import hashlib
import io
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
import lm_eval.tasks
import numpy as np
import torch
from lm_eval.api.model import CacheHook
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate as run_tasks
from lm_eval.tasks import TaskManager

from ..calibration import Calibration
from ..calibrations import Calibrations
from ..methods import Full, Method
from ..positions import check_context
from ..progress import Progress, silent
from ..runs import Runs
from ..spec import parse_method
from . import task_data
from .harness import XQuantLM

FAMILIES = ("gsm8k", "truthfulqa", "longbench", "ruler")
"""lm-eval's folders that are looked through first: all of its folders take ten seconds."""

RULER_CONTEXT = 4096
"""Tokens of RULER's prompts with their answers, where none are asked for: lm-eval's own default."""

RESAMPLES = 1000
"""For the standard error of a metric that has no closed form of it."""


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


@dataclass(frozen=True)
class Asked:
    """A task, or a group of them, that is ready to run; ``build`` makes it for a tokenizer."""

    name: str
    build: Callable[[Any], list[Any]]
    context: int | None = None
    files: tuple[Path, ...] = ()  # local data, or a task of one's own

    @property
    def title(self) -> str:
        return self.name if self.context is None else f"{self.name} {self.context}"

    @property
    def digest(self) -> str:
        """Of the local files."""
        return hashlib.sha256(b"".join(file.read_bytes() for file in self.files)).hexdigest()


def ask(
    names: Sequence[str], data: str | Path | None = None, contexts: Sequence[int] = ()
) -> list[Asked]:
    """Look up tasks and their data: in ``data``, a file or a folder, or without it on the hub.

    Args:
        names: tasks or groups of lm-eval, or YAML files of tasks. With local data that has no training
            split, ``gsm8k`` is lm-eval's ``gsm8k_cot``: its examples are fixed.
        contexts: tokens of RULER's prompts.

    Raises:
        ValueError: unknown task, or data that is missing or of another form; OSError: it cannot be read.
    """
    source = None if data is None else Path(data)
    if source is not None and not source.exists():
        raise ValueError(f"there is no data '{source}'")
    with _quiet():
        manager = _manager(names)
        members = [leaf for name in dict.fromkeys(names) for leaf in _members(manager, name)]
        asked: list[Asked] = []
        for name in dict.fromkeys(members):
            if task_data.is_ruler(name):
                for context in contexts or (RULER_CONTEXT,):
                    asked.append(_ask_ruler(manager, name, context, source))
            else:
                asked.append(_ask(manager, name, source))
    return asked


def evaluate(
    model: Any,
    tokenizer: Any,
    methods: Sequence[str | Method],
    asked: Sequence[Asked],
    limit: int | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
    calibrations: Iterable[Calibration] = (),
    runs: Runs | None = None,
) -> list[TaskRow]:
    """Run tasks with the full cache first, then with each of ``methods``, on their first ``limit`` rows.

    Each of ``calibrations`` goes to the methods it was made for. ``runs`` keeps every part that is
    finished, and has those of a run that was stopped.

    Raises:
        ValueError: unknown method, a calibration that is missing, or a prompt that the model has no room
            for; all but the last are raised before the first task.
    """
    wanted = list(dict.fromkeys([Full(), *map(parse_method, methods)]))
    runs = runs or Runs(None, {})
    check_context(model, max((one.context or 0 for one in asked), default=0))
    made, show = Calibrations(calibrations), progress or silent
    with _quiet():
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
    done, total = 0, len(asked) * len(wanted)
    for one in asked:
        tasks: list[Any] = []
        baseline: list[dict[str, Any]] = []
        for method, lm in models.items():
            name = f"{method.spec} {one.title} limit={limit} batch={batch_size} {one.digest}"
            parts = runs.load(name)
            if parts is None:
                tell = partial(show, done, total)
                tell(f"{method.spec}, {one.title}")
                tasks = tasks or one.build(tokenizer)
                lm.set_cache_hook(_Counter(f"{method.spec}, {one.title}", tell))
                parts = [_run(lm, task, limit) for task in tasks]
                runs.save(name, parts)
            baseline = baseline or parts
            for part, full in zip(parts, baseline, strict=True):
                rows += _rows(method, one, part, full)
            done += 1
    show(done, total, "")
    return rows


# -- looking up ---------------------------------------------------------------------------------


def _manager(names: Sequence[str]) -> TaskManager:
    """lm-eval's index of tasks, only as much of it as ``names`` need.

    Raises:
        ValueError: a name is not in it.
    """
    tasks = [name for name in names if not _is_file(name)]
    first = _index(FAMILIES)
    # A tag (a loose set of tasks) may have members in other folders.
    if all(name in {*first.all_subtasks, *first.all_groups} for name in tasks):
        return first
    everything = _index(None)
    for name in tasks:
        if name not in everything.task_index:
            near = difflib.get_close_matches(name, everything.all_tasks, 3)
            hint = f"; is it {' or '.join(near)}?" if near else ": 'lm-eval ls tasks' lists them"
            raise ValueError(f"unknown task '{name}'{hint}")
    return everything


def _is_file(name: str) -> bool:
    return name.endswith(".yaml") and Path(name).is_file()


@cache
def _index(folders: tuple[str, ...] | None) -> TaskManager:
    if folders is None:
        return TaskManager()
    root = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_defaults=False, include_path=[root / name for name in folders])


def _members(manager: TaskManager, name: str) -> list[str]:
    """The tasks of a group that only lists names; otherwise ``name`` itself."""
    entry = manager.task_index.get(name)
    kind = entry.kind.name if entry else ""
    if kind == "TAG":
        names = sorted(entry.tags)
    elif kind == "GROUP" and all(isinstance(member, str) for member in entry.cfg["task"]):
        names = entry.cfg["task"]
    else:
        return [name]
    return [leaf for member in names for leaf in _members(manager, member)]


def _ask(manager: TaskManager, name: str, data: Path | None) -> Asked:
    task = name
    overrides: Mapping[str, Any] = {}
    files = [Path(name)] if _is_file(name) else []
    if data is not None and name in manager.all_subtasks:
        if name == "gsm8k" and not task_data.has_examples(data):
            task = "gsm8k_cot"
        config = manager.task_index[task].cfg
        overrides, files = task_data.local_rows(task, config, data)
    built = _build(manager, task, overrides, files)
    return Asked(name, lambda _: built, files=tuple(files))


def _ask_ruler(manager: TaskManager, name: str, context: int, data: Path | None) -> Asked:
    file = task_data.ruler_file(name, context, data)
    metadata = manager.task_index[name].cfg.get("metadata", {})

    def build(tokenizer: Any) -> list[Any]:
        overrides = task_data.ruler_overrides(name, context, tokenizer.name_or_path, file)
        overrides["metadata"] |= {"version": metadata.get("version")}
        essays = task_data.local_essays(file) if file and name in task_data.ESSAYS else None
        with _quiet(), essays or contextlib.nullcontext():
            return _build(manager, name, overrides, [file] if file else [])

    return Asked(name, build, context, (file,) if file else ())


def _build(
    manager: TaskManager, name: str, overrides: Mapping[str, Any], files: Sequence[Path]
) -> list[Any]:
    """lm-eval's own task objects, several for a group.

    Raises:
        ValueError: they cannot be made, for lack of data or of a package.
    """
    _seed()  # lm-eval makes some rows at random
    spec = {"group": "local", "task": [{"task": name, **overrides}]} if overrides else name
    try:
        return list(manager.load([spec])["tasks"].values())
    except (OSError, ValueError, KeyError, ImportError, jinja2.TemplateError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        if files:
            raise ValueError(f"'{files[0]}' does not fit {name} ({why})") from error
        raise ValueError(
            f"{name} cannot be had ({why}); data that is not to be had from the hub can be given as files,"
            " with --data"
        ) from error


# -- running ------------------------------------------------------------------------------------


def _run(lm: XQuantLM, task: Any, limit: int | None) -> dict[str, Any]:
    """What one method made of one task: its metrics, and its answers row by row."""
    _seed()
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    name, started = task.task_name, time.perf_counter()
    try:
        # Its own resampling would start processes, in the middle of ours.
        with _quiet(), patch.dict(os.environ, DISABLE_MULTIPROC="1"):
            results = run_tasks(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=RESAMPLES)
    except AssertionError as error:  # how lm-eval refuses prompts and settings
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
    """lm-eval's ``"metric,filter"`` and ``"metric_stderr,filter"`` in pairs."""
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
    method: Method, asked: Asked, part: Mapping[str, Any], full: Mapping[str, Any]
) -> list[TaskRow]:
    pairs = list(zip(part["answers"], full["answers"], strict=True))
    answered = any(answer is not None for answer, _ in pairs)
    return [
        TaskRow(
            method=method.spec,
            task=asked.name if asked.name == "gsm8k" else part["task"],
            **metric,
            n=len(pairs),
            agreement=sum(own == other for own, other in pairs) if answered else None,
            seconds=part["seconds"],
            lm_eval_task=part["task"],
            version=part["version"],
            shots=part["shots"],
            context=asked.context,
        )
        for metric in part["metrics"]
        # RULER's tasks name -1 for the contexts they were not made to.
        if asked.context is None or metric["metric"] == str(asked.context)
    ]


class _Counter(CacheHook):
    """lm-eval tells its cache of every request that is finished; this one only counts them."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        super().__init__(None)
        self._what, self._tell, self._count = what, tell, 0

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self._count += 1
        self._tell(f"{self._what}: {self._count} done")


def _seed() -> None:
    """lm-eval's own seeds, set before every task: what runs beside it must not change its rows."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval and what it uses write on both streams; what matters of it is in rows and errors."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield

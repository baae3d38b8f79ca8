"""Finds tasks of lm-evaluation-harness and their data, and makes them ready to run."""

import contextlib
import difflib
import hashlib
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import lm_eval.tasks
import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager

from . import task_data

FAMILIES = ("gsm8k", "truthfulqa", "longbench", "ruler")
"""lm-eval's folders that are searched first: searching all of them takes ten seconds."""

RULER_CONTEXT = 4096
"""Tokens of RULER's prompts with their answers, where none are asked for: lm-eval's own default."""


@dataclass(frozen=True)
class ReadyTask:
    """A task, or a group of them, that is ready to run; ``build`` makes it for a tokenizer."""

    name: str
    build: Callable[[Any], list[Any]]
    context: int | None = None
    files: tuple[Path, ...] = ()  # local data, or a task of one's own

    @property
    def title(self) -> str:
        """How progress and kept runs call it."""
        return self.name if self.context is None else f"{self.name} {self.context}"

    @property
    def digest(self) -> str:
        """SHA-256 of the local files."""
        return hashlib.sha256(b"".join(file.read_bytes() for file in self.files)).hexdigest()


def find_tasks(
    names: Sequence[str], data: str | Path | None = None, contexts: Sequence[int] = ()
) -> list[ReadyTask]:
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
    with quiet():
        manager = _manager(names)
        members = [leaf for name in dict.fromkeys(names) for leaf in _members(manager, name)]
        found: list[ReadyTask] = []
        for name in dict.fromkeys(members):
            if task_data.is_ruler(name):
                for context in contexts or (RULER_CONTEXT,):
                    found.append(_ready_ruler(manager, name, context, source))
            else:
                found.append(_ready(manager, name, source))
    return found


def _manager(names: Sequence[str]) -> TaskManager:
    """lm-eval's index of tasks: of `FAMILIES` where that has all ``names``, otherwise of everything.

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


def _ready(manager: TaskManager, name: str, data: Path | None) -> ReadyTask:
    task = name
    overrides: Mapping[str, Any] = {}
    files = [Path(name)] if _is_file(name) else []
    if data is not None and name in manager.all_subtasks:
        if name == "gsm8k" and not task_data.has_examples(data):
            task = "gsm8k_cot"
        config = manager.task_index[task].cfg
        overrides, files = task_data.local_rows(task, config, data)
    built = _build(manager, task, overrides, files)
    return ReadyTask(name, lambda _: built, files=tuple(files))


def _ready_ruler(manager: TaskManager, name: str, context: int, data: Path | None) -> ReadyTask:
    file = task_data.ruler_file(name, context, data)
    metadata = manager.task_index[name].cfg.get("metadata", {})

    def build(tokenizer: Any) -> list[Any]:
        overrides = task_data.ruler_overrides(name, context, tokenizer.name_or_path, file)
        overrides["metadata"] |= {"version": metadata.get("version")}
        essays = task_data.local_essays(file) if file and name in task_data.ESSAYS else None
        with quiet(), essays or contextlib.nullcontext():
            return _build(manager, name, overrides, [file] if file else [])

    return ReadyTask(name, build, context, (file,) if file else ())


def _build(manager: TaskManager, name: str, overrides: Mapping[str, Any], files: Sequence[Path]) -> list[Any]:
    """lm-eval's own task objects, several for a group.

    Raises:
        ValueError: they cannot be made, for lack of data or of a package.
    """
    seed()  # lm-eval makes some rows at random
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


def seed() -> None:
    """Set lm-eval's own seeds, before every task: its rows must not depend on what ran before."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval and the packages that it uses, which write to both streams."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield

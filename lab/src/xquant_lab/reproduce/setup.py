"""What an experiment runs on: a model, the data that was given, and the size that was asked for."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from xquant import calibration_store
from xquant.analysis.shapes import Skeleton
from xquant.calibration import Calibration
from xquant.calibrations import Calibrations
from xquant.calibrators.run import calibrate_together
from xquant.calibrators.writing import GENERATED, write_samples
from xquant.codecs import fingerprint
from xquant.methods import Method
from xquant.progress import Progress, silent
from xquant.runs import Runs, code_digest, identity, tell_unfit
from xquant.seam.hooks import attach
from xquant.spec import parse_method
from xquant.text import cut_windows

from ..evals.journal import Journal
from ..evals.perplexity import PerplexityRow, measure
from ..pyramid.layout import layout_of

if TYPE_CHECKING:
    from ..evals.tasks import TaskRow

TOGETHER = 8
"""Methods that are calibrated in the same passes: each holds about 100 MB of counts for a small model."""


@dataclass
class Setup:
    """A model and what it is measured on.

    Calibrations that are not among those given are made: from ``calibration_text``, or from a text that the
    model writes. With a folder ``resume``, they and finished measurements are kept in it and found again.
    """

    model: Any
    tokenizer: Any
    text: str | None = None
    context: int = 2048
    windows: int = 4
    data: Path | None = None
    limit: int | None = None  # rows of a task
    answer: int | None = None  # tokens of an answer at most
    calibration_text: str | None = None
    calibration_name: str = ""
    calibration_windows: int = 16
    calibrations: Calibrations = field(default_factory=Calibrations)
    resume: Path | None = None
    progress: Progress = silent

    @cached_property
    def ids(self) -> Tensor:
        """The windows of the text, ``[windows, context]``."""
        assert self.text is not None
        return cut_windows(self.model, self.tokenizer, self.text, self.context, self.windows)

    def perplexity(self, specs: Sequence[str]) -> dict[str, PerplexityRow]:
        """By its spec, the perplexity of each method on the text."""
        methods = list(dict.fromkeys(map(parse_method, specs)))
        ids, calibrations = self.ids, self.calibrated(methods)
        journal = self.journal({"context": self.context})
        rows = measure(self.model, ids, methods, calibrations, journal)
        return {row.method: row for row in rows}

    def tasks(
        self, specs: Sequence[str], names: Sequence[str], metric: str
    ) -> "dict[tuple[str, str], TaskRow]":
        """By spec and task of lm-eval, one of the task's metrics; without ``data`` rows are the hub's.

        Of prompts longer than ``context`` tokens the end is read, unless they are made to a length.

        Raises:
            ValueError: unknown task, missing data, or data of another form.
        """
        from ..evals.task_lookup import find_tasks  # and with it lm-eval
        from ..evals.tasks import Settings, evaluate

        tasks = find_tasks(names, self.data, (self.context,))
        methods = list(map(parse_method, specs))
        calibrations = self.calibrated(methods)
        settings = Settings(
            self.limit,
            longest=None if any(task.context for task in tasks) else self.context,
            most=self.answer,
            compare=True,
        )
        journal = self.journal({})
        rows = evaluate(self.model, self.tokenizer, methods, tasks, settings, calibrations, journal)
        return {(row.method, row.task): row for row in rows if row.metric == metric}

    @cached_property
    def skeleton(self) -> Skeleton:
        """The model without its weights, for what is planned."""
        return Skeleton(self.model.config, self.model.dtype)

    def cache_ratio(self, spec: str) -> float:
        """The bytes of a cache of ``context`` tokens over those of the fp16 cache, as planned."""
        layout = layout_of(self.skeleton, parse_method(spec))
        return layout.count(self.context, 1).total / layout.full_nbytes(self.context, 1)

    def calibrated(self, methods: Sequence[Method]) -> Calibrations:
        """The calibrations of the methods that need one, made where they are missing."""
        lacking = self.calibrations.lacking(methods)
        found = [self._kept(method) for method in lacking]
        left = [method for method, one in zip(lacking, found, strict=True) if one is None]
        made = [one for one in found if one is not None]
        while left:
            together, left = left[:TOGETHER], left[TOGETHER:]
            made += self._calibrate(together)
        self.calibrations = Calibrations([*self.calibrations, *made])
        return self.calibrations

    def journal(self, subject: dict[str, Any]) -> Journal:
        """Of a measurement that depends on this setup and on ``subject``."""
        facts = identity(self.model, self.text or "", self.calibrations)
        device, dtype = str(self.model.device), str(self.model.dtype)
        runs = Runs(self.resume, {**subject, **facts, "device": device, "dtype": dtype})
        return Journal(runs, self.progress)

    @cached_property
    def weights(self) -> str:
        """The digest of what the model's caches depend on."""
        return fingerprint(attach(self.model).view.compressed)

    def file(self, kind: str, *facts: Any) -> Path | None:
        """Where something that was made on the calibration text is kept: None without ``resume``."""
        if self.resume is None:
            return None
        size = self.context, self.calibration_windows
        source = *facts, self.weights, self.calibration_text, size, code_digest()
        key = hashlib.sha256(repr(source).encode()).hexdigest()
        return self.resume / f"{kind}-{key[:16]}.safetensors"

    def _kept(self, method: Method) -> Calibration | None:
        """The calibration that an earlier run of the same code has made."""
        file = self.file("calibration", method.calibrated_as)
        if file is None or not file.exists():
            return None
        expected = method.expected(attach(self.model).view.compressed)
        found = calibration_store.usable(file, method.calibrated_as, self.weights, expected)
        if found is None:
            tell_unfit(file)
        return found

    def _calibrate(self, methods: Sequence[Method]) -> list[Calibration]:
        samples, name = self.samples
        made = calibrate_together(self.model, samples, methods, name, self.progress)
        for method, one in zip(methods, made, strict=True):
            file = self.file("calibration", method.calibrated_as)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                one.save(file)
        return made

    @cached_property
    def samples(self) -> tuple[Tensor, str]:
        """Token ids to calibrate on, ``[calibration_windows, context]``, and their name."""
        size = self.context, self.calibration_windows
        if self.calibration_text is not None:
            ids = cut_windows(self.model, self.tokenizer, self.calibration_text, *size)
            return ids, self.calibration_name
        ids = write_samples(self.model, self.tokenizer, *size, progress=self.progress)
        return ids, f"{GENERATED} (seed 0)"

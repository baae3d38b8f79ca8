"""Trials: the contenders of a benchmark with what is measured of each. The full cache takes part in all its
forms, and so does every method."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

import torch

from xquant import compat
from xquant.calibrations import Calibrations
from xquant.methods import Method

from . import capacity, flash
from .clocks import reason
from .contenders import Contender, Full, Grouped, Models, Static, contender_of

DTYPES = torch.float32, torch.bfloat16, torch.float16
FULL_SETTINGS = tuple((dtype, attention) for dtype in DTYPES for attention in ("sdpa", "eager"))


@dataclass
class Settings:
    """The size of the caches, what is timed, and how often."""

    context: int
    batch: int = 1
    rounds: int = 15
    warm_up: int = 3
    kernel: str = "auto"
    dtypes: tuple[torch.dtype, ...] = DTYPES[:2]
    whole: bool = True
    """Also decode whole tokens; otherwise attention alone is timed."""
    sealing: bool = False
    """Also time how tokens are appended and sealed."""
    packed: bool = False
    """Compressed caches decode with packed weights; the full cache is tried with them, too."""
    weights_bits: int | None = None
    """Of the model's weights, which all caches decode with; None: as many as the dtype has."""
    compiled: bool = False
    """Compressed caches decode with compiled models; the full cache is tried with them, too."""
    static: bool = False
    """Every method also takes part with a cache in memory of a fixed size."""
    parts: bool = False
    """Also time what attention is made of: storing a token, codes and outliers."""

    @property
    def size(self) -> tuple[int, int]:
        """Context and batch."""
        return self.context, self.batch

    @property
    def steps(self) -> int:
        """Tokens that a trial decodes in all rounds: two in each."""
        return 2 * (self.warm_up + self.rounds)


@dataclass
class Trial:
    """A contender in one dtype and setting, with its times or the reason why there are none."""

    name: str
    dtype: torch.dtype
    setting: str
    contender: Contender | None = None
    failed: str = ""
    slow: bool = False
    """Whether it was given up, because another trial of this name, or the full cache, was much faster."""
    behind: float = 0
    """How many times as long as the full cache it took, where it was given up for that."""
    packed: bool = False
    compiled: bool = False
    """Both as of the contender."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """The times of all rounds, by job."""
    timed_by: dict[str, str] = field(default_factory=dict)
    """How each job was timed."""

    @classmethod
    def of(cls, contender: Contender) -> "Trial":
        """The trial of a contender that is there."""
        own = contender.name, contender.dtype, contender.setting, contender
        return cls(*own, packed=contender.packed, compiled=contender.compiled)

    @property
    def label(self) -> str:
        """Dtype and setting, as a row names them."""
        words = str(self.dtype).removeprefix("torch."), self.setting
        return " ".join([*words, *["packed"] * self.packed, *["compiled"] * self.compiled])

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """An error becomes the reason why this trial failed, and the others go on. On a GPU memory may run
        out, and a kernel may never have run."""
        try:
            yield
        except Exception as error:
            self.failed, self.contender = reason(error), None
        if self.failed:
            capacity.release()


def on_cpu(
    models: Models, methods: Sequence[Method], settings: Settings, calibrations: Calibrations
) -> list[Trial]:
    """The full cache in transformers' settings, and every method, in every dtype."""
    contenders: list[Contender] = []
    for dtype, attention in FULL_SETTINGS:
        if dtype in settings.dtypes:
            contenders += _full_on_cpu(models, dtype, attention, settings)
    for method in methods:
        for dtype in settings.dtypes if settings.whole else settings.dtypes[:1]:
            compressed = _compressed(models, method, dtype, settings, calibrations)
            compressed.prepare(settings.packed, settings.compiled)
            contenders.append(compressed)
            if settings.static:
                static = _static(models, method, dtype, settings, calibrations)
                static.prepare(settings.packed, settings.compiled)
                contenders.append(static)
    return [Trial.of(contender) for contender in contenders]


def _full_on_cpu(
    models: Models, dtype: torch.dtype, attention: str, settings: Settings
) -> Iterator[Contender]:
    ways = (sorted({False, asked}) for asked in (settings.packed, settings.compiled))
    for packed, compiled in product(*ways):
        full = Full(models.plain(dtype), attention, *settings.size)
        full.prepare(packed, compiled)
        yield full
    if not settings.whole and dtype == torch.bfloat16 and attention == "sdpa":
        yield Grouped(models.plain(dtype), attention, *settings.size)


def on_gpu(
    models: Models, methods: Sequence[Method], settings: Settings, calibrations: Calibrations
) -> list[Trial]:
    """The full cache with every kernel over the same states, and every method. Those that do not fit into
    memory have failed."""
    device, config = models.model.device, compat.text_config(models.model)
    trials = [each for dtype in settings.dtypes for each in _full_on_gpu(models, dtype, settings)]
    for method in methods:
        for dtype in settings.dtypes if settings.whole else settings.dtypes[:1]:
            trial = Trial(method.spec, dtype, settings.kernel)
            trials.append(trial)
            layout = capacity.layout(config, method, dtype)
            trial.failed = capacity.lacking(capacity.needed_bytes(layout, *settings.size), device)
            if not trial.failed:
                with trial.noting_failure():
                    made = _compressed(models, method, dtype, settings, calibrations)
                    trial.contender, trial.setting = made, made.setting
    return trials


def _full_on_gpu(models: Models, dtype: torch.dtype, settings: Settings) -> list[Trial]:
    model, whole = models.plain(dtype), settings.whole
    kernels = flash.BACKENDS if whole else flash.KERNELS
    trials = [Trial("full", dtype, kernel) for kernel in kernels]
    steps = settings.steps * len(trials) if whole else 0
    nbytes = capacity.full_bytes(compat.text_config(model), dtype, *settings.size)
    states = Trial("full", dtype, "its states")
    states.failed = capacity.lacking(nbytes, model.device)
    if not states.failed:
        with states.noting_failure():
            cache = flash.filled(model, dtype, *settings.size, steps)
    for trial in trials:
        trial.failed = states.failed
        if not trial.failed:
            with trial.noting_failure():
                make = flash.Stepping if whole else flash.Flash
                trial.contender = make(model, cache, trial.setting)
    return trials


def _static(
    models: Models,
    method: Method,
    dtype: torch.dtype,
    settings: Settings,
    calibrations: Calibrations,
) -> Static:
    own = calibrations.of(method), settings.kernel
    return Static(models.attached(dtype), method, settings.size, settings.steps, *own)


def _compressed(
    models: Models,
    method: Method,
    dtype: torch.dtype,
    settings: Settings,
    calibrations: Calibrations,
) -> Contender:
    calibration = calibrations.of(method)
    return contender_of(models.attached(dtype), method, *settings.size, calibration, settings.kernel)

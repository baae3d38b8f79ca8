"""Trials: the contenders of a benchmark with what is measured of each. The full cache takes part in all its
forms, and so does every method."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import torch
from transformers import DynamicCache

from xquant import compat
from xquant.calibrations import Calibrations
from xquant.methods import Method
from xquant.progress import Progress

from . import capacity, flash
from .clocks import reason
from .contenders import STATIC, Contender, Full, Grouped, Models, Static, contender_of, random_cache

DTYPES = torch.float32, torch.bfloat16, torch.float16
ATTENTIONS = "sdpa", "eager"
"""transformers' own."""


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


Maker = Callable[[Settings], Contender]
MakeOurs = Callable[[Models, Method, torch.dtype, Settings, Calibrations], Contender]


def label(dtype: torch.dtype, setting: str, packed: bool, compiled: bool) -> str:
    """What tells the settings of one contender apart."""
    return " ".join([_name(dtype), setting, *["packed"] * packed, *["compiled"] * compiled])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    cache_bytes: int | None = None
    """Of a cache that was freed."""
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
        return label(self.dtype, self.setting, self.packed, self.compiled)

    @property
    def what(self) -> str:
        """Its name and `label`."""
        return f"{self.name}, {self.label}"

    def free(self) -> None:
        """Free its cache, which is timed no more."""
        assert self.contender is not None
        self.cache_bytes, self.contender = self.contender.cache_bytes, None

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
    models: Models,
    methods: Sequence[Method],
    settings: Settings,
    calibrations: Calibrations,
    peers: Mapping[str, Maker],
    progress: Progress,
) -> list[Trial]:
    """The full cache in transformers' settings, every method in every dtype, and the peers. Last come those
    that take minutes to compile: the full cache's settings."""
    states = cache(lambda dtype: random_cache(models.plain(dtype), *settings.size))
    plans = {
        **_full_on_cpu(models, settings, states, False),
        **_methods_on_cpu(models, methods, settings, calibrations),
        **peers,
        **(_full_on_cpu(models, settings, states, True) if settings.compiled else {}),
    }
    trials = []
    for number, (what, make) in enumerate(plans.items()):
        progress(number, len(plans), f"filling {what}")
        trials.append(Trial.of(make(settings)))
    return trials


def _full_on_cpu(
    models: Models, settings: Settings, states: Callable[[torch.dtype], DynamicCache], compiled: bool
) -> dict[str, Maker]:
    """The settings of the full cache that are compiled or not. Those of one dtype share its ``states``."""
    found: dict[str, Maker] = {}

    def make(kind: type[Full], dtype: torch.dtype, attention: str, packed: bool, asked: Settings) -> Full:
        full = kind(models.plain(dtype, packed), attention, *asked.size, states(dtype))
        full.prepare(packed, compiled)
        return full

    for dtype, attention, packed in product(settings.dtypes, ATTENTIONS, sorted({False, settings.packed})):
        name = label(dtype, attention, packed, compiled)
        found[f"full, {name}"] = partial(make, Full, dtype, attention, packed)
        if not settings.whole and (dtype, attention) == (torch.bfloat16, "sdpa"):
            found[f"{Grouped.name}, {name}"] = partial(make, Grouped, dtype, attention, packed)
    return found


def _methods_on_cpu(
    models: Models, methods: Sequence[Method], settings: Settings, calibrations: Calibrations
) -> dict[str, Maker]:
    found: dict[str, Maker] = {}

    def make(kind: MakeOurs, method: Method, dtype: torch.dtype, asked: Settings) -> Contender:
        made = kind(models, method, dtype, asked, calibrations)
        made.prepare(asked.packed, asked.compiled)
        return made

    kinds: dict[str, MakeOurs] = {"": _compressed}
    if settings.static:
        kinds[f", {STATIC}"] = _static
    dtypes = settings.dtypes if settings.whole else settings.dtypes[:1]
    for method, dtype, (word, kind) in product(methods, dtypes, kinds.items()):
        found[f"{method.spec}{word}, {_name(dtype)}"] = partial(make, kind, method, dtype)
    return found


def on_gpu(
    models: Models,
    methods: Sequence[Method],
    settings: Settings,
    calibrations: Calibrations,
    peers: Mapping[str, Maker],
    progress: Progress,
) -> list[Trial]:
    """The full cache with every kernel over the same states, every method, and the peers. Methods that do not
    fit into memory have failed."""
    device, config = models.model.device, compat.text_config(models.model)
    dtypes = settings.dtypes if settings.whole else settings.dtypes[:1]
    total = 1 + len(methods) * len(dtypes) + len(peers)
    progress(0, total, "filling full")
    trials = [each for dtype in settings.dtypes for each in _full_on_gpu(models, dtype, settings)]
    for number, (method, dtype) in enumerate(product(methods, dtypes), 1):
        trial = Trial(method.spec, dtype, settings.kernel)
        progress(number, total, f"filling {trial.what}")
        trials.append(trial)
        layout = capacity.layout(config, method, dtype)
        trial.failed = capacity.lacking(capacity.needed_bytes(layout, *settings.size), device)
        if not trial.failed:
            with trial.noting_failure():
                made = _compressed(models, method, dtype, settings, calibrations)
                trial.contender, trial.setting = made, made.setting
    for number, (what, make) in enumerate(peers.items(), total - len(peers)):
        progress(number, total, f"filling {what}")
        trials.append(Trial.of(make(settings)))
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
            held = flash.filled(model, dtype, *settings.size, steps)
    for trial in trials:
        trial.failed = states.failed
        if not trial.failed:
            with trial.noting_failure():
                make = flash.Stepping if whole else flash.Flash
                trial.contender = make(model, held, trial.setting)
    return trials


def _static(
    models: Models, method: Method, dtype: torch.dtype, settings: Settings, calibrations: Calibrations
) -> Contender:
    own = calibrations.of(method), settings.kernel
    return Static(models.attached(dtype, settings.packed), method, settings.size, settings.steps, *own)


def _compressed(
    models: Models, method: Method, dtype: torch.dtype, settings: Settings, calibrations: Calibrations
) -> Contender:
    model, calibration = models.attached(dtype, settings.packed), calibrations.of(method)
    return contender_of(model, method, *settings.size, calibration, settings.kernel)

"""Who takes part in a measurement: the full cache in all its forms, and every method."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .. import compat
from ..calibrations import Calibrations
from ..methods import Method
from . import capacity, flash
from .clocks import reason
from .contenders import Compressed, Contender, Full, Grouped, Models

DTYPES = torch.float32, torch.bfloat16, torch.float16
FULL_SETTINGS = tuple((dtype, attention) for dtype in DTYPES for attention in ("sdpa", "eager"))


@dataclass
class Settings:
    """What is measured, and how often."""

    context: int
    batch: int = 1
    rounds: int = 15
    warm_up: int = 3
    kernel: str = "auto"
    dtypes: tuple[torch.dtype, ...] = DTYPES[:2]
    whole: bool = True
    """Decode whole tokens too, rather than the attention alone."""
    sealing: bool = False
    """Also time how tokens are appended and sealed."""

    @property
    def size(self) -> tuple[int, int]:
        return self.context, self.batch


@dataclass
class Entrant:
    """A contender and what was measured of it, or why it could not be."""

    name: str
    dtype: torch.dtype
    setting: str
    contender: Contender | None = None
    failed: str = ""
    slow: bool = False
    """Given up, because another of this name was much faster."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a round each, by what was timed."""
    timed_by: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, contender: Contender) -> "Entrant":
        return cls(contender.name, contender.dtype, contender.setting, contender)

    @property
    def label(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.setting}"

    @contextmanager
    def trying(self) -> Iterator[None]:
        """What fails is noted, and the others go on: on a GPU memory ends, and kernels may never have run."""
        try:
            yield
        except Exception as error:
            self.failed, self.contender = reason(error), None
        if self.failed:
            capacity.release()


def on_cpu(
    models: Models, methods: Sequence[Method], settings: Settings, calibrations: Calibrations
) -> list[Entrant]:
    """The full cache in transformers' settings, and every method, in every dtype."""
    contenders: list[Contender] = []
    for dtype, attention in FULL_SETTINGS:
        if dtype in settings.dtypes:
            own = models.plain(dtype)
            contenders.append(Full(own, attention, *settings.size))
            if not settings.whole and dtype == torch.bfloat16 and attention == "sdpa":
                contenders.append(Grouped(own, attention, *settings.size))
    for method in methods:
        for dtype in settings.dtypes if settings.whole else settings.dtypes[:1]:
            contenders.append(_compressed(models, method, dtype, settings, calibrations))
    return [Entrant.of(contender) for contender in contenders]


def on_gpu(
    models: Models, methods: Sequence[Method], settings: Settings, calibrations: Calibrations
) -> list[Entrant]:
    """The full cache by every kernel there is, over the same states, and every method; as far as memory
    goes."""
    device, config = models.model.device, compat.text_config(models.model)
    entrants = [e for dtype in settings.dtypes for e in _full_on_gpu(models, dtype, settings)]
    for method in methods:
        for dtype in settings.dtypes if settings.whole else settings.dtypes[:1]:
            entrant = Entrant(method.spec, dtype, settings.kernel)
            entrants.append(entrant)
            layout = capacity.layout(config, method, dtype)
            entrant.failed = capacity.lacking(capacity.cache_room(layout, *settings.size), device)
            if not entrant.failed:
                with entrant.trying():
                    made = _compressed(models, method, dtype, settings, calibrations)
                    entrant.contender, entrant.setting = made, made.setting
    return entrants


def _full_on_gpu(models: Models, dtype: torch.dtype, settings: Settings) -> list[Entrant]:
    model, whole = models.plain(dtype), settings.whole
    kernels = flash.BACKENDS if whole else flash.KERNELS
    entrants = [Entrant("full", dtype, kernel) for kernel in kernels]
    steps = 2 * (settings.warm_up + settings.rounds) * len(entrants) if whole else 0
    nbytes = capacity.full_bytes(compat.text_config(model), dtype, *settings.size)
    states = Entrant("full", dtype, "its states")
    states.failed = capacity.lacking(nbytes, model.device)
    if not states.failed:
        with states.trying():
            cache = flash.filled(model, dtype, *settings.size, steps)
    for entrant in entrants:
        entrant.failed = states.failed
        if not entrant.failed:
            with entrant.trying():
                make = flash.Stepping if whole else flash.Flash
                entrant.contender = make(model, cache, entrant.setting)
    return entrants


def _compressed(
    models: Models,
    method: Method,
    dtype: torch.dtype,
    settings: Settings,
    calibrations: Calibrations,
) -> Compressed:
    calibration = calibrations.of(method)
    model = models.attached(dtype)
    return Compressed(model, method, *settings.size, calibration, settings.kernel)

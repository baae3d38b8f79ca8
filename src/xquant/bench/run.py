"""Decode time beside the uncompressed cache: everything interleaved in one run, filled with random states."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .. import compat
from ..analysis.roofline import attention_step
from ..calibration import Calibration
from ..calibrations import Calibrations
from ..methods import Method
from ..progress import Progress
from . import appending as sealing
from . import capacity, entrants
from .ceilings import Ceilings, ceilings
from .clocks import Clock, GraphClock, HostClock, Job
from .contenders import Compressed, Contender, Models, attentions
from .entrants import Entrant, Settings

HOPELESS = 2.0
STEP, ATTENTION = "step", "attend"

Row = dict[str, Any]
MakeClock = Callable[[Job, torch.device], Clock]
Clocks = dict[tuple[int, str], Clock]
"""By the entrant's place and the job."""


@torch.inference_mode()
def bench(
    models: Models,
    methods: Sequence[Method],
    settings: Settings,
    progress: Progress,
    calibrations: Iterable[Calibration] = (),
    peers: Sequence[Callable[[Settings], Contender]] = (),
    limits: Ceilings | None = None,
) -> list[Row]:
    """A row for the full cache (the best of its settings) and for every method.

    On a GPU a row may say instead why there is nothing to say.

    Args:
        peers: makers of further contenders.
        limits: of the device; measured here where they are not given.
    """
    device = models.model.device
    on_gpu = device.type == "cuda"
    if on_gpu and limits is None:
        limits = ceilings(device)
    progress(0, 1, "filling the caches")
    gather = entrants.on_gpu if on_gpu else entrants.on_cpu
    field = gather(models, methods, settings, Calibrations(calibrations))
    field += [Entrant.of(make(settings)) for make in peers]
    if on_gpu:
        measure_on_gpu(field, settings, progress)
    else:
        measure_on_cpu(field, settings, progress)
    limits = limits or ceilings(device)
    layers = len(attentions(models.model))
    known = {method.spec: method for method in methods}
    rows = []
    for name in dict.fromkeys(entrant.name for entrant in field):
        row, best = _row(name, field, settings, layers, limits)
        if limits.copy and limits.multiply:
            row["roofline"] = _predict(row, models.model, known.get(name), limits)
        if settings.sealing and best is not None and name in known:
            with best.trying():
                row["sealing"] = _time_sealing(best)
            if best.failed:
                row["sealing"] = {"failed": best.failed}
        rows.append(row)
    return rows


def measure_on_cpu(field: Sequence[Entrant], settings: Settings, progress: Progress) -> None:
    """Decode tokens, and their attention alone, in turn."""
    jobs = (STEP, ATTENTION) if settings.whole else (ATTENTION,)
    _measure(field, _clocks(field, jobs, HostClock), jobs, settings, progress)


def measure_on_gpu(field: Sequence[Entrant], settings: Settings, progress: Progress) -> None:
    """Attention alone, then whole tokens: a graph reads a cache as it was, and decoding changes it."""
    phases: dict[str, MakeClock] = {ATTENTION: GraphClock}
    if settings.whole:
        phases[STEP] = HostClock
    for job, kind in phases.items():
        _measure(field, _clocks(field, (job,), kind), (job,), settings, progress, tolerant=True)


def _clocks(field: Sequence[Entrant], jobs: Sequence[str], kind: MakeClock) -> Clocks:
    return {
        (i, job): kind(getattr(entrant.contender, job), entrant.contender.device)
        for i, entrant in enumerate(field)
        for job in jobs
        if entrant.contender is not None and (job != ATTENTION or entrant.contender.alone)
    }


def _measure(
    field: Sequence[Entrant],
    clocks: Clocks,
    jobs: Sequence[str],
    settings: Settings,
    progress: Progress,
    tolerant: bool = False,
) -> None:
    """Seconds of ``jobs``, by entrant and round. Those are given up that, when the warm-up has ended, took
    `HOPELESS` times as long at the first job as another of their name: they would cost most of the time,
    and keep the times of the warm-up. ``tolerant``: so are those that fail.
    """
    total = settings.warm_up + settings.rounds
    for entrant in field:
        entrant.slow = False
        entrant.seconds |= {job: [] for job in jobs}
    for number in range(total):
        if number == settings.warm_up:
            _give_up(field, jobs[0])
        for i, entrant in enumerate(field):
            progress(number * len(field) + i, total * len(field), entrant.name)
            if entrant.failed or entrant.slow:
                continue
            turn = {job: clocks[i, job] for job in jobs if (i, job) in clocks}
            if number == settings.warm_up:
                entrant.seconds |= {job: [] for job in jobs}
            if tolerant:
                with entrant.trying():
                    _take_turn(entrant, turn, number == 0)
            else:
                _take_turn(entrant, turn, number == 0)
            if entrant.failed:
                for job in turn:
                    del clocks[i, job]
                capacity.release()
    for (i, job), clock in clocks.items():
        field[i].timed_by[job] = clock.how


def _take_turn(entrant: Entrant, turn: dict[str, Clock], first: bool) -> None:
    for job, clock in turn.items():
        if first:
            clock.settle()
        entrant.seconds[job].append(clock())


def _give_up(field: Sequence[Entrant], job: str) -> None:
    found = [min(entrant.seconds[job], default=0.0) for entrant in field]
    best: dict[str, float] = {}
    for entrant, taken in zip(field, found, strict=True):
        if not entrant.failed:
            best[entrant.name] = min(taken, best.get(entrant.name, taken))
    for entrant, taken in zip(field, found, strict=True):
        entrant.slow = not entrant.failed and taken > HOPELESS * best[entrant.name]


def _row(
    name: str, field: Sequence[Entrant], settings: Settings, layers: int, limits: Ceilings
) -> tuple[Row, Entrant | None]:
    """The row of those of this name, and the one that it tells of; None where all failed."""
    decisive = STEP if settings.whole else ATTENTION
    tried = [entrant for entrant in field if entrant.name == name]
    best = _best(tried, decisive)
    shown = best or tried[0]
    full = _best([entrant for entrant in field if entrant.name == "full"], decisive)
    row = {
        "method": name,
        "context": settings.context,
        "batch": settings.batch,
        "dtype": str(shown.dtype).removeprefix("torch."),
        "kernel": shown.setting,
        "failed": shown.failed or None,
        "measured": "decode" if settings.whole else f"attention of {layers} layers",
        **_times(best, full, decisive),
        **_attention(best, layers, limits),
        "rounds": settings.rounds,
        "timed_by": shown.timed_by,
        "tried": {
            e.label: statistics.median(e.seconds[decisive]) * 1e3 for e in tried if not e.failed
        },
        "refused": {e.label: e.failed for e in tried if e.failed},
    }
    return row, best


def _best(tried: Sequence[Entrant], job: str) -> Entrant | None:
    there = [entrant for entrant in tried if not entrant.failed and not entrant.slow]
    return min(there, key=lambda entrant: statistics.median(entrant.seconds[job]), default=None)


def _times(best: Entrant | None, full: Entrant | None, job: str) -> Row:
    """Of a token, alone and beside the full cache in the same rounds."""
    row: Row = dict.fromkeys(
        ("ms_per_token", "ms_min_max", "speedup_vs_full", "speedup_min_max"), None
    )
    if best is not None:
        taken = best.seconds[job]
        row["ms_per_token"] = statistics.median(taken) * 1e3
        row["ms_min_max"] = [min(taken) * 1e3, max(taken) * 1e3]
        if full is not None:
            ratios = sorted(a / b for a, b in zip(full.seconds[job], taken, strict=True))
            row["speedup_vs_full"] = statistics.median(ratios)
            row["speedup_min_max"] = [ratios[0], ratios[-1]]
    return row


def _attention(best: Entrant | None, layers: int, limits: Ceilings) -> Row:
    """Of one layer, and the bytes of the cache a second beside what the device can."""
    nbytes = seconds = rate = None
    if best is not None:
        assert best.contender is not None
        nbytes = best.contender.cache_bytes
        if best.contender.alone:
            seconds = statistics.median(best.seconds[ATTENTION]) / layers
            rate = nbytes / layers / seconds
    row: Row = {
        "attention_ms_per_layer": seconds and seconds * 1e3,
        "cache_bytes": nbytes,
        "gbytes_per_second": rate and rate / 1e9,
    }
    for kind, limit in (("read", limits.read), ("copy", limits.copy)):
        row[f"{kind}_gbytes_per_second"] = limit and limit / 1e9
        row[f"share_of_{kind}_bandwidth"] = rate / limit if rate and limit else None
    return row


def _predict(row: Row, model: Any, method: Method | None, limits: Ceilings) -> Row | None:
    """The least time of a layer's attention by what was measured of the device, and the full cache's, whose
    bytes are all that counts; None where a method's is not known."""
    assert limits.copy is not None and limits.multiply is not None
    config, dtype = compat.text_config(model), getattr(torch, row["dtype"])
    layers, size = len(attentions(model)), (row["context"], row["batch"])
    full = capacity.full_bytes(config, dtype, *size) / limits.copy
    found: Row = {
        "full_ms_per_layer": full / layers * 1e3,
        "multiply_tflops_per_second": limits.multiply / 1e12,
    }
    if method is None:
        return found
    least = attention_step(capacity.layout(config, method, dtype), *size)
    if least is None:
        return None
    seconds = least.seconds(limits.copy, limits.multiply) / layers
    return {**asdict(least), "ms_per_layer": seconds * 1e3, **found}


def _time_sealing(entrant: Entrant) -> Row:
    contender = entrant.contender
    assert isinstance(contender, Compressed)
    attention = statistics.median(entrant.seconds[ATTENTION])
    found = sealing.time_appending(contender)
    return sealing.as_fields(found, contender.cache.method.group, attention)

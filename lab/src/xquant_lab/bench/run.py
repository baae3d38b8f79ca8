"""Decode time beside the uncompressed cache. All caches are filled with random states and take turns in one
run."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch

from xquant import compat
from xquant.calibration import Calibration
from xquant.calibrations import Calibrations
from xquant.methods import Method
from xquant.progress import Progress

from . import appending as sealing
from . import capacity, trials
from .ceilings import Ceilings, ceilings
from .clocks import GraphClock, HostClock
from .contenders import STATIC, Compressed, Models, attentions
from .parts import dense, parts_of
from .roofline import attention_step
from .rounds import ATTENTION, STEP, MakeClock, Rounds, Told, nobody
from .trials import Maker, Settings, Trial

Row = dict[str, Any]
See = Callable[[list[Row]], None]
NO_PEERS: Mapping[str, Maker] = MappingProxyType({})


def unseen(rows: list[Row]) -> None:
    """A `See` that looks at nothing."""


@torch.inference_mode()
def bench(
    models: Models,
    methods: Sequence[Method],
    settings: Settings,
    progress: Progress,
    calibrations: Iterable[Calibration] = (),
    peers: Mapping[str, Maker] = NO_PEERS,
    limits: Ceilings | None = None,
    see: See = unseen,
) -> list[Row]:
    """A row for the full cache (the fastest of its settings) and for every method.

    On a GPU a row may instead say why the method could not be timed.

    Args:
        methods: for `Settings.parts` with those of `parts.with_dense`.
        peers: makers of further contenders, by what they are called while they are filled.
        limits: of the device; they are measured here where they are not given.
        see: given the rows after every round, as they are then: without shares of a bandwidth that is yet to
            be measured, and without what is timed after the rounds.
    """
    device = models.model.device
    on_gpu = device.type == "cuda"
    if on_gpu and limits is None:
        limits = ceilings(device)
    layers = len(attentions(models.model))
    gather, measure = (trials.on_gpu, measure_on_gpu) if on_gpu else (trials.on_cpu, measure_on_cpu)
    every = gather(models, methods, settings, Calibrations(calibrations), peers, progress)

    def rows_now() -> list[tuple[Row, Trial | None]]:
        names = dict.fromkeys(trial.name for trial in every)
        return [_row(name, every, settings, layers, limits or Ceilings()) for name in names]

    measure(every, settings, progress, lambda: see([row for row, _ in rows_now()]))
    limits = limits or ceilings(device)
    known = {method.spec: method for method in methods}
    rows = []
    for row, best in rows_now():
        if limits.copy and limits.multiply:
            of_method = known.get(row["method"].removesuffix(f" {STATIC}"))
            row["roofline"] = _predict(row, models.model, of_method, limits)
        asked = settings.sealing or settings.parts
        if asked and best is not None and isinstance(best.contender, Compressed):
            with best.noting_failure():
                row["sealing"] = _time_sealing(best)
            if best.failed:
                row["sealing"] = {"failed": best.failed}
        rows.append(row)
    if settings.parts:
        by_name = {row["method"]: row for row in rows}
        for method in methods:
            row, codes = (by_name[each.spec] for each in (method, dense(method)))
            row["parts"] = parts_of(row, codes, layers)
    return rows


def measure_on_cpu(every: Sequence[Trial], settings: Settings, progress: Progress, see: Told) -> None:
    """Time decoding steps, and their attention alone, in the same rounds."""
    jobs = (STEP, ATTENTION) if settings.whole else (ATTENTION,)
    Rounds(every, jobs, HostClock, settings).run(progress, see)


def measure_on_gpu(every: Sequence[Trial], settings: Settings, progress: Progress, see: Told) -> None:
    """Time attention in all rounds first, then decoding steps: a graph reads memory that decoding changes."""
    phases: dict[str, MakeClock] = {ATTENTION: GraphClock}
    if settings.whole:
        phases[STEP] = HostClock
    for number, (job, kind) in enumerate(phases.items(), 1):
        last = number == len(phases)  # which rows are of
        rounds = Rounds(every, (job,), kind, settings, tolerant=True, frees=last)
        rounds.run(progress, see if last else nobody)


def _row(
    name: str, every: Sequence[Trial], settings: Settings, layers: int, limits: Ceilings
) -> tuple[Row, Trial | None]:
    """The row of the fastest trial of this name, and that trial; None where all failed."""
    decisive = STEP if settings.whole else ATTENTION
    tried = [trial for trial in every if trial.name == name]
    best = _best(tried, decisive)
    shown = best or tried[0]
    full = _best([trial for trial in every if trial.name == "full"], decisive)
    counted = best or full
    row = {
        "method": name,
        "context": settings.context,
        "batch": settings.batch,
        "dtype": str(shown.dtype).removeprefix("torch."),
        "kernel": shown.setting,
        "packed": shown.packed,
        "weights_bits": settings.weights_bits,
        "compiled": shown.compiled,
        "failed": shown.failed or None,
        "dropped": None if best else _dropped(tried, decisive),
        "measured": "decode" if settings.whole else f"attention of {layers} layers",
        **_times(best, full, decisive),
        **_attention(best, layers, limits),
        "rounds": len(counted.seconds[decisive]) if counted else 0,
        "rounds_asked": settings.rounds,
        "timed_by": shown.timed_by,
        "tried": {e.label: statistics.median(e.seconds[decisive]) * 1e3 for e in tried if not e.failed},
        "refused": {e.label: e.failed for e in tried if e.failed},
    }
    if row["dropped"]:
        row["cache_bytes"] = shown.cache_bytes
    return row, best


def _dropped(tried: Sequence[Trial], job: str) -> str | None:
    """Why there is no time of a peer: what its fastest trial took in the warm-up."""
    slow = [trial for trial in tried if trial.slow]
    if not slow:
        return None
    first = min(slow, key=lambda trial: min(trial.seconds[job]))
    taken = f"{min(first.seconds[job]) * 1e3:,.0f} ms a token"
    return f"dropped after the warm-up: {taken}, {first.behind:.1f} times the full cache"


def _best(tried: Sequence[Trial], job: str) -> Trial | None:
    """The trial of the least median."""
    there = [trial for trial in tried if not trial.failed and not trial.slow]
    return min(there, key=lambda trial: statistics.median(trial.seconds[job]), default=None)


def _times(best: Trial | None, full: Trial | None, job: str) -> Row:
    """The times of a token, and their ratios to the full cache's of the same rounds."""
    row: Row = dict.fromkeys(("ms_per_token", "ms_min_max", "speedup_vs_full", "speedup_min_max"), None)
    if best is not None:
        taken = best.seconds[job]
        row["ms_per_token"] = statistics.median(taken) * 1e3
        row["ms_min_max"] = [min(taken) * 1e3, max(taken) * 1e3]
        if full is not None:
            ratios = sorted(a / b for a, b in zip(full.seconds[job], taken, strict=True))
            row["speedup_vs_full"] = statistics.median(ratios)
            row["speedup_min_max"] = [ratios[0], ratios[-1]]
    return row


def _attention(best: Trial | None, layers: int, limits: Ceilings) -> Row:
    """The time of one layer's attention, and the bytes of the cache a second as a share of the bandwidth."""
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
    """The least time of a layer's attention by the limits of the device, for the method and for the full
    cache, of which only the bytes count. None where it is not known for the method."""
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


def _time_sealing(trial: Trial) -> Row:
    contender = trial.contender
    assert isinstance(contender, Compressed)
    attention = statistics.median(trial.seconds[ATTENTION])
    found = sealing.time_appending(contender)
    return sealing.as_fields(found, contender.cache.method.group, attention)

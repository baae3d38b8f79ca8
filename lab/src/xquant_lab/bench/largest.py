"""The largest batch that fits beside a model's weights, and how many tokens a second are decoded with it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from xquant import compat
from xquant.analysis.plan import largest
from xquant.calibration import Calibration
from xquant.calibrations import Calibrations
from xquant.methods import Method
from xquant.progress import Progress

from . import capacity, flash
from .clocks import reason, synchronize
from .contenders import Contender, Models, contender_of

WARM_UP = 4
"""Steps before those that are timed."""
TRIES = 6
SMALLER = 0.9
"""The next batch is so many times the one that did not fit."""

Row = dict[str, Any]
Make = Callable[[int], Contender]
"""Called with the batch."""


@torch.inference_mode()
def largest_batches(
    models: Models,
    methods: Sequence[Method],
    context: int,
    dtype: torch.dtype,
    kernel: str,
    memory: float,
    progress: Progress,
    calibrations: Iterable[Calibration] = (),
) -> Iterator[Row]:
    """A row for the full cache and for every method: the largest batch, and the time of decoding steps with
    it.

    The first batch that is tried is the largest that should fit, by what the caches take. Where it runs out
    of memory, smaller ones follow. Caches are filled with random states. The steps that are timed fill one
    block, so that every layer seals once. The full cache copies nothing as it grows, and uses the fastest
    of torch's attention backends.

    Args:
        memory: bytes that caches and activations may take beside the weights.
    """
    made = Calibrations(calibrations)
    steps = max(method.group for method in methods)
    # The full cache tries its backends before the steps that are timed.
    further = steps + WARM_UP * (1 + 2 * len(flash.BACKENDS))
    config = compat.text_config(models.model)
    full: float | None = None
    takes: dict[str, tuple[Make, Callable[[int], int]]] = {
        "full": (
            partial(_full, models.plain(dtype), dtype, context, further),
            partial(capacity.full_bytes, config, dtype, context + further),
        )
    }
    for method in methods:
        layout = capacity.layout(config, method, dtype)
        takes[method.spec] = (
            partial(_compressed, models.attached(dtype), method, context, made, kernel),
            partial(capacity.needed_bytes, layout, context + further),
        )
    for number, (name, (make, nbytes)) in enumerate(takes.items()):
        progress(number, len(takes), name)
        estimate = largest(nbytes, capacity.SHARE * memory)
        row: Row = {"method": name, "context": context, "steps": steps, "estimated_batch": estimate}
        row |= _measured(make, estimate, steps)
        rate = row["tokens_per_second"]
        if number == 0:
            full = rate
        yield {**row, "times_full": rate / full if rate and full else None}


def _full(model: Any, dtype: torch.dtype, context: int, room: int, batch: int) -> Contender:
    """The full cache, with the backend that takes the least time."""
    cache = flash.filled(model, dtype, context, batch, room)
    taken: dict[float, Contender] = {}
    refused: list[str] = []
    for kernel in flash.BACKENDS:
        contender = flash.Stepping(model, cache, kernel)
        try:
            _decode(contender, WARM_UP)
            taken[_decode(contender, WARM_UP)] = contender
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            refused.append(f"{kernel}: {reason(error)}")
    if not taken:
        raise RuntimeError("; ".join(refused))
    return taken[min(taken)]


def _compressed(
    model: Any,
    method: Method,
    context: int,
    calibrations: Calibrations,
    kernel: str,
    batch: int,
) -> Contender:
    return contender_of(model, method, context, batch, calibrations.of(method), kernel)


def _measured(make: Make, batch: int, steps: int) -> Row:
    """Times at ``batch``, or at the largest batch tried below it that did not run out of memory."""
    failed = "not one sequence fits"
    for _ in range(TRIES):
        if batch < 1:
            break
        try:
            return _timed(make(batch), steps)
        except Exception as error:  # kernels raise errors of all kinds
            failed = reason(error)
            if not isinstance(error, torch.OutOfMemoryError):
                break
        capacity.release()
        batch = int(batch * SMALLER)
    names = ("batch", "kernel", "ms_per_step", "tokens_per_second", "cache_bytes", "weights_bytes")
    return {**dict.fromkeys(names), "failed": failed}


def _timed(contender: Contender, steps: int) -> Row:
    _decode(contender, WARM_UP)
    seconds = _decode(contender, steps)
    return {
        "batch": contender.batch,
        "kernel": contender.setting,
        "ms_per_step": seconds / steps * 1e3,
        "tokens_per_second": contender.batch * steps / seconds,
        "cache_bytes": contender.cache_bytes,
        "weights_bytes": sum(p.nbytes for p in contender.model.parameters()),
        "failed": None,
    }


def _decode(contender: Contender, steps: int) -> float:
    """Seconds of so many decoding steps."""
    synchronize(contender.device)
    start = time.perf_counter()
    for _ in range(steps):
        contender.step()
    synchronize(contender.device)
    return time.perf_counter() - start

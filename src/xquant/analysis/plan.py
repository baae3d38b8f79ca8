"""Plans: a row for each method on a model and a GPU, with its bytes and what fits."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..methods import Method
from .gpus import GPU
from .memory import CacheLayout
from .roofline import layout_load
from .shapes import Skeleton

MOST = 1 << 31
"""The most tokens, or sequences, that a plan tries."""


def plan(
    skeleton: Skeleton, methods: Sequence[Method], gpu: GPU, context: int, batch: int
) -> list[dict[str, Any]]:
    """A row for every method: the bytes of its cache, whether they fit beside the weights, and how far
    rematerialization is free.

    A cache fits where the most bytes that it holds on the way to ``context`` tokens do.

    Raises:
        ValueError: options that the model does not allow.
    """
    return [_row(CacheLayout(skeleton, method), gpu, context, batch) for method in methods]


def _row(layout: CacheLayout, gpu: GPU, context: int, batch: int) -> dict[str, Any]:
    held = layout.count(context, batch)
    weights, codec = layout.skeleton.nbytes, layout.codec_nbytes
    room = gpu.memory - weights - codec
    peak = layout.peak(context, batch)
    load = layout_load(layout)
    bound = None if load is None else load.memory_bound_context(gpu.ridge) / batch
    return {
        "method": layout.method.spec,
        "context": context,
        "batch": batch,
        "cache_bytes": held.total,
        "parts": asdict(held),
        "estimated": layout.estimated,
        "full_cache_bytes": layout.full_nbytes(context, batch),
        "peak_bytes": peak,
        "weights_bytes": weights,
        "codec_bytes": codec,
        "gpu_bytes": round(gpu.memory),
        "fits": peak <= room,
        "max_context": largest(lambda tokens: layout.peak(tokens, batch), room),
        "max_batch": largest(lambda sequences: layout.peak(context, sequences), room),
        "rematerialization_flops": None if load is None else round(load.flops),
        "memory_bound_context": bound if bound is None or math.isinf(bound) else int(bound),
    }


def largest(nbytes: Callable[[int], int], room: float) -> int:
    """The largest number for which ``nbytes``, which grows with it, is no more than ``room``; 0 if none."""
    return bisect_right(range(1, MOST), room, key=nbytes)

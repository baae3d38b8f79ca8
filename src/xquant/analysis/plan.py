"""Plans: a row for each method on a model and a GPU, with its bytes and what fits."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..methods import Method
from .activations import Activations
from .gpus import GPU
from .memory import CacheLayout
from .roofline import layout_load
from .shapes import Skeleton

MOST = 1 << 31
"""The most tokens, or sequences, that a plan tries."""


def plan(
    skeleton: Skeleton,
    methods: Sequence[Method],
    gpu: GPU,
    context: int,
    batch: int,
    chunk: int,
    past_positions: bool = False,
) -> list[dict[str, Any]]:
    """A row for every method: the bytes of its cache, whether they fit beside the weights, and how far
    rematerialization is free.

    A cache grows to ``context`` tokens, and may for a moment hold more bytes on the way than at the end. It
    fits if that peak fits, together with the activations of the largest pass. One of the rows has ``take``,
    see `choose`.

    Args:
        chunk: tokens of a prompt that are read at a time.
        past_positions: whether the longest context may have more tokens than the model has positions.

    Raises:
        ValueError: options that the model does not allow.
    """
    limit = MOST if past_positions else skeleton.positions or MOST
    layouts = [CacheLayout(skeleton, method) for method in methods]
    rows = [_row(layout, gpu, context, batch, chunk, limit) for layout in layouts]
    chosen = choose(rows)
    return [{**row, "take": row is chosen} for row in rows]


def choose(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row to take of those that fit: the one with the most bits a code, and so the full cache if it fits.
    Among rows with as many bits, a method that computes no keys and values anew comes first, then one that
    needs no calibration, then the smallest cache. None where none fits."""
    fitting = [row for row in rows if row["fits"]]
    return max(
        fitting,
        key=lambda row: (
            round(row["code_bits"], 1),
            not row["rebuilds"],
            not row["needs_calibration"],
            -row["cache_bytes"],
        ),
        default=None,
    )


def _row(layout: CacheLayout, gpu: GPU, context: int, batch: int, chunk: int, limit: int) -> dict[str, Any]:
    held, activations = layout.count(context, batch), Activations(layout)
    weights, codec = layout.skeleton.nbytes, layout.codec_nbytes
    room = gpu.memory - weights - codec

    def needed(tokens: int, sequences: int) -> int:
        active = (
            activations.prefill(tokens, sequences, chunk),
            activations.decode(tokens, sequences),
        )
        return layout.peak(tokens, sequences) + max(active)

    load = layout_load(layout)
    bound = None if load is None else load.memory_bound_context(gpu.ridge) / batch
    longest = largest(lambda tokens: needed(tokens, batch), room)
    return {
        "method": layout.method.spec,
        "context": context,
        "batch": batch,
        "chunk": chunk,
        "cache_bytes": held.total,
        "parts": asdict(held),
        "estimated": layout.estimated,
        "full_cache_bytes": layout.full_nbytes(context, batch),
        "peak_bytes": layout.peak(context, batch),
        "prefill_bytes": activations.prefill(context, batch, chunk),
        "decode_bytes": activations.decode(context, batch),
        "weights_bytes": weights,
        "codec_bytes": codec,
        "gpu_bytes": round(gpu.memory),
        "fits": needed(context, batch) <= room,
        "max_context": min(longest, limit),
        "max_context_in_memory": longest,
        "max_batch": largest(lambda sequences: needed(context, sequences), room),
        "code_bits": layout.code_bits,
        "rebuilds": layout.rebuilds,
        "needs_calibration": layout.method.needs_calibration,
        "rematerialization_flops": None if load is None else round(load.flops),
        "memory_bound_context": bound if bound is None or math.isinf(bound) else int(bound),
    }


def largest(nbytes: Callable[[int], int], room: float) -> int:
    """The largest number for which ``nbytes``, which grows with it, is no more than ``room``; 0 if none."""
    return bisect_right(range(1, MOST), room, key=nbytes)

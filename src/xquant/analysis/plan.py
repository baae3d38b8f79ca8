"""Plans: a row for each method on a model and a GPU, with its bytes and what fits, or what would."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .activations import Activations
from .gpus import GPU
from .memory import CacheLayout
from .roofline import layout_load

FEWER_BITS = (8, 4)
"""The bits of weights that are tried where nothing fits."""
MOST = 1 << 31
"""The most tokens, or sequences, that a plan tries."""


def plan(
    layouts: Sequence[CacheLayout],
    gpu: GPU,
    context: int,
    batch: int,
    chunk: int,
    past_positions: bool = False,
) -> list[dict[str, Any]]:
    """A row for the cache of every method: its bytes, whether they fit beside the weights, and how far
    rematerialization is free.

    A cache grows to ``context`` tokens, and may for a moment hold more bytes on the way than at the end. It
    fits if that peak fits, together with the activations of the largest pass. One of the rows has ``take``,
    see `choose`.

    Args:
        chunk: tokens of a prompt that are read at a time.
        past_positions: whether the longest context may have more tokens than the model has positions.
    """
    limit = MOST if past_positions else layouts[0].skeleton.positions or MOST
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


def would_fit(
    layouts: Sequence[CacheLayout], gpu: GPU, context: int, batch: int, chunk: int
) -> list[dict[str, Any]]:
    """The row to take if the weights stayed as they are, and with `FEWER_BITS` for them: of each that fits.
    ``weights_bits`` says what the weights have, and is None where they stay."""
    skeleton, found = layouts[0].skeleton, []
    for bits in (None, *FEWER_BITS):
        saved = 0 if bits is None else skeleton.nbytes - skeleton.nbytes_at(bits)
        roomier = replace(gpu, memory=gpu.memory + saved)
        row = choose([_size(layout, roomier, context, batch, chunk) for layout in layouts])
        if row is not None and (bits is None or saved > 0):
            found.append({**row, "weights_bits": bits, "total_bytes": row["total_bytes"] - saved})
    return found


def _size(layout: CacheLayout, gpu: GPU, context: int, batch: int, chunk: int) -> dict[str, Any]:
    """What a method takes, and what `choose` goes by."""
    activations, peak = Activations(layout), layout.peak(context, batch)
    prefill, decode = activations.prefill(context, batch, chunk), activations.decode(context, batch)
    weights, codec = layout.skeleton.nbytes, layout.codec_nbytes
    total = peak + max(prefill, decode) + weights + codec
    return {
        "method": layout.method.spec,
        "cache_bytes": layout.count(context, batch).total,
        "peak_bytes": peak,
        "prefill_bytes": prefill,
        "decode_bytes": decode,
        "weights_bytes": weights,
        "codec_bytes": codec,
        "total_bytes": total,
        "fits": total <= gpu.memory,
        "code_bits": layout.code_bits,
        "rebuilds": layout.rebuilds,
        "needs_calibration": layout.method.needs_calibration,
    }


def _row(layout: CacheLayout, gpu: GPU, context: int, batch: int, chunk: int, limit: int) -> dict[str, Any]:
    size, activations = _size(layout, gpu, context, batch, chunk), Activations(layout)
    room = gpu.memory - size["weights_bytes"] - size["codec_bytes"]

    def needed(tokens: int, sequences: int) -> int:
        prefill = activations.prefill(tokens, sequences, chunk)
        return layout.peak(tokens, sequences) + max(prefill, activations.decode(tokens, sequences))

    load = layout_load(layout)
    bound = None if load is None else load.memory_bound_context(gpu.ridge) / batch
    longest = largest(lambda tokens: needed(tokens, batch), room)
    return {
        **size,
        "context": context,
        "batch": batch,
        "chunk": chunk,
        "parts": asdict(layout.count(context, batch)),
        "estimated": layout.estimated,
        "full_cache_bytes": layout.full_nbytes(context, batch),
        "gpu_bytes": round(gpu.memory),
        "max_context": min(longest, limit),
        "max_context_in_memory": longest,
        "max_batch": largest(lambda sequences: needed(context, sequences), room),
        "rematerialization_flops": None if load is None else round(load.flops),
        "memory_bound_context": bound if bound is None or math.isinf(bound) else int(bound),
    }


def largest(nbytes: Callable[[int], int], room: float) -> int:
    """The largest number for which ``nbytes``, which grows with it, is no more than ``room``; 0 if none."""
    return bisect_right(range(1, MOST), room, key=nbytes)

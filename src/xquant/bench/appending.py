"""What storing new tokens costs beside attending: how long a cache takes to append and to seal them."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from .clocks import synchronize
from .contenders import Compressed, random_states


@dataclass(frozen=True)
class Appending:
    """Seconds in all layers, launched by Python, while one block is filled token by token."""

    plain: float
    """All tokens but those that seal."""
    sealing: float
    """Those that do."""


def time_appending(contender: Compressed) -> Appending:
    """Fill another block of a cache. Two are filled, and the second counts."""
    cache, batch = contender.cache, contender.batch
    states = [random_states(layer.codec.view, batch, 1) for layer in cache.compressed]
    taken = {True: 0.0, False: 0.0}
    block = cache.method.group
    for number in range(2 * block):
        before = [layer.stream.version for layer in cache.compressed]
        position = cache.index.positions[:, -1:] + 1
        cache.index.append(position, torch.ones_like(position, dtype=torch.bool))
        synchronize(contender.device)
        start = time.perf_counter()
        for layer, seen in zip(cache.compressed, states, strict=True):
            layer.append(seen)
        synchronize(contender.device)
        if number >= block:
            sealed = before != [layer.stream.version for layer in cache.compressed]
            taken[sealed] += time.perf_counter() - start
        cache.finish()
    return Appending(plain=taken[False], sealing=taken[True])


def as_fields(found: Appending, block: int, attention: float) -> dict[str, Any]:
    """As a row has it; ``attention``: seconds of one token in all layers.

    The share is of the time that appending, sealing and attending take together while a block is filled;
    the rest of a decoding step, its products, is not in it.
    """
    storing = found.plain + found.sealing
    return {
        "block": block,
        "append_ms_per_token": found.plain / max(block - 1, 1) * 1e3,
        "seal_ms_per_block": found.sealing * 1e3,
        "share_of_attention_and_storing": storing / (storing + block * attention),
    }

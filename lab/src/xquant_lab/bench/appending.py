"""How long a cache takes to append new tokens and to seal blocks of them."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from xquant.kernels.trial import random_states

from .clocks import synchronize
from .contenders import Compressed


@dataclass(frozen=True)
class Appending:
    """Seconds in all layers, launched by Python, to fill one block token by token."""

    plain: float
    """Of the tokens that are only appended."""
    sealing: float
    """Of the tokens with which a block is sealed."""


def time_appending(contender: Compressed) -> Appending:
    """Fill two more blocks of a cache, and time the second."""
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
        for layer, inputs in zip(cache.compressed, states, strict=True):
            layer.append(inputs)
        synchronize(contender.device)
        if number >= block:
            sealed = before != [layer.stream.version for layer in cache.compressed]
            taken[sealed] += time.perf_counter() - start
        cache.finish()
    return Appending(plain=taken[False], sealing=taken[True])


def as_fields(found: Appending, block: int, attention: float) -> dict[str, Any]:
    """The fields of a row.

    Storing is compared with storing and attention together while a block is filled. The matrix products of a
    decoding step are left out.

    Args:
        attention: seconds of one token's attention in all layers.
    """
    storing = found.plain + found.sealing
    return {
        "block": block,
        "append_ms_per_token": found.plain / max(block - 1, 1) * 1e3,
        "seal_ms_per_block": found.sealing * 1e3,
        "share_of_attention_and_storing": storing / (storing + block * attention),
    }

"""What fits into memory, known before it is tried."""

import copy
import gc
from collections.abc import Sequence
from typing import Any

import torch

from ..analysis.memory import CacheLayout
from ..analysis.shapes import Skeleton
from ..methods import Method
from ..store.slabs import GROWTH

SHARE = 0.9
"""Of the free memory that caches may take; the rest is for what is computed with them."""


def release() -> None:
    """Give back to a GPU what nothing refers to any more: caches are cycles, and errors keep what they were
    met with."""
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """That a GPU has left for us."""
    release()
    return int(torch.cuda.mem_get_info(device)[0])


def layout(config: Any, method: Method, dtype: torch.dtype) -> CacheLayout:
    """What a method keeps on a model of this configuration."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # whatever the model uses
    return CacheLayout(Skeleton(config, dtype), method)


def cache_room(layout: CacheLayout, context: int, batch: int) -> int:
    """The most bytes that a method's cache takes on its way to ``context`` tokens, reserves included, and
    the weights that the method adds."""
    return layout.codec_nbytes + round(layout.peak(context, batch) * (1 + 1 / GROWTH))


def together(
    config: Any, methods: Sequence[Method], dtype: torch.dtype, context: int, batch: int
) -> int:
    """Bytes of the full cache and of those of all ``methods``."""
    layouts = [layout(config, method, dtype) for method in methods]
    full = full_bytes(config, dtype, context, batch)
    return full + sum(cache_room(found, context, batch) for found in layouts)


def full_bytes(config: Any, dtype: torch.dtype, context: int, batch: int) -> int:
    """Of the uncompressed cache, of a model whose layers keep all tokens."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_key_value_heads * size
    return 2 * batch * context * width * dtype.itemsize


def lacking(nbytes: int, device: torch.device) -> str:
    """Why so many bytes do not fit on a GPU; empty where they do."""
    free = free_bytes(device)
    if nbytes <= SHARE * free:
        return ""
    return f"does not fit: {nbytes / 1e9:.1f} GB, where {free / 1e9:.1f} GB are free"

"""How much memory caches need, computed before they are made."""

import copy
import gc
from collections.abc import Sequence
from typing import Any

import torch

from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.methods import Method
from xquant.past.slabs import GROWTH

from ..pyramid.layout import layout_of

SHARE = 0.9
"""Share of the free memory that caches may take; the rest is left for activations."""


def release() -> None:
    """Give memory that nothing refers to back to the GPU. Caches are reference cycles, and errors keep the
    frames that they were raised in, so garbage is collected first."""
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU."""
    release()
    return int(torch.cuda.mem_get_info(device)[0])


def layout(config: Any, method: Method, dtype: torch.dtype) -> CacheLayout:
    """The bytes of a method on a model of this configuration."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # no kernels are needed to count bytes
    return layout_of(Skeleton(config, dtype), method)


def needed_bytes(layout: CacheLayout, context: int, batch: int) -> int:
    """The most bytes that a method takes on the way to ``context`` tokens: its cache, the memory that the
    cache reserves to grow, and the weights that the method adds."""
    return layout.codec_nbytes + round(layout.peak(context, batch) * (1 + 1 / GROWTH))


def together(config: Any, methods: Sequence[Method], dtype: torch.dtype, context: int, batch: int) -> int:
    """Bytes of the full cache and of the caches of all ``methods``."""
    layouts = [layout(config, method, dtype) for method in methods]
    full = full_bytes(config, dtype, context, batch)
    return full + sum(needed_bytes(found, context, batch) for found in layouts)


def full_bytes(config: Any, dtype: torch.dtype, context: int, batch: int) -> int:
    """Bytes of the uncompressed cache of a model whose layers keep all tokens."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_key_value_heads * size
    return 2 * batch * context * width * dtype.itemsize


def lacking(nbytes: int, device: torch.device) -> str:
    """Why so many bytes do not fit on a GPU; empty where they fit."""
    free = free_bytes(device)
    if nbytes <= SHARE * free:
        return ""
    return f"does not fit: {nbytes / 1e9:.1f} GB, where {free / 1e9:.1f} GB are free"

"""Layers that keep a state, as Mamba's and linear attention do: vLLM keeps it, in blocks of the pool in which
our pages lie.

vLLM gives pages and states one size, by pages of more tokens. Ours have a size of their own.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from xquant.serve.capacity import States

from .checks import wanted_of
from .guard import is_wrapped, wrap


def install() -> None:
    """Hook in; once for a process."""
    wrap(type(current_platform), "_align_hybrid_block_size", _aligned)
    wrap(kv_cache_utils, "get_kv_cache_groups", _grouped)


def _aligned(original: Callable[..., None], config: VllmConfig, *more: Any) -> None:
    if wanted_of(config) is None:
        original(*more)
    elif config.cache_config.mamba_cache_mode == "align":  # states are kept where blocks end
        config.cache_config.mamba_block_size = config.cache_config.block_size


def _grouped(original: Callable[..., Any], config: VllmConfig, *more: Any) -> list[KVCacheGroupSpec]:
    groups = original(*more)
    if wanted_of(config) is None:
        return groups
    return [replace(each, kv_cache_spec=_alike(each.kv_cache_spec)) for each in groups]


def _alike(spec: KVCacheSpec) -> KVCacheSpec:
    """Of a group whose layers have the same states, that of one: vLLM does not look for Mamba's in a
    collection."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    first, *others = spec.kv_cache_specs.values()
    return first if isinstance(first, MambaSpec) and all(each == first for each in others) else spec


def count_loaded() -> None:
    """Have vLLM count the block of a state that a connector loads beside that of the step which goes on from
    there: it takes both, and ends the engine where it has one, which is what it counted."""
    if not is_wrapped(MambaManager, "get_num_blocks_to_allocate"):
        wrap(MambaManager, "get_num_blocks_to_allocate", _counted)


def _counted(original: Callable[..., int], manager: Any, *given: Any, **more: Any) -> int:
    _, _, _, computed, local, *_ = given
    return original(*given, **more) + (manager.mamba_cache_mode == "align" and computed > local)


def states_of(config: VllmConfig) -> list[States]:
    """What layers of the loaded model ask of a pool for states. Where prefixes are found again, requests have
    the state at the end of their last whole block beside their own."""
    layers = config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(config) for layer in layers if isinstance(layer, MambaBase)]
    each = 2 if config.cache_config.mamba_cache_mode == "align" else 1
    found = Counter(spec.page_size_bytes for spec in specs)
    return [States(count, page, each) for page, count in found.items()]

"""Layers with sliding windows, of which vLLM keeps the cache: what a connector stores of them.

Of a prefix they need its last tokens alone. So their pages are stored of few blocks: those that a window
reaches back to from a *checkpoint*, a place between two blocks from which a prompt can go on.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec

from xquant.quant.states import coded, decoded
from xquant.serve.fit import ConnectorOptions

_PAGES = "pages"


def spec_of(group: KVCacheGroupSpec) -> KVCacheSpec:
    """Of the layers of a group, which vLLM may wrap."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(group.layer_names[0], group.kv_cache_spec)


class Windows:
    """The layers with sliding windows of an engine, all of one kind. Of a model without any, nothing is
    stored.

    Args:
        config: vLLM's, of all its groups of layers.
        block: tokens of a page.
    """

    def __init__(self, config: KVCacheConfig, options: ConnectorOptions, block: int) -> None:
        specs = [spec_of(each) for each in config.kv_cache_groups]
        found = {i: each for i, each in enumerate(specs) if isinstance(each, SlidingWindowSpec)}
        self.groups = tuple(found)
        """Those of vLLM's groups of layers that these are in."""
        self._layers = [config.kv_cache_groups[i].layer_names for i in found]
        self._bits, self._block, self._reach = options.state_bits, block, 0
        self._every = max(1, options.every // block)
        self.kind = b""
        """What tells their pages apart from others of the same tokens and model."""
        assert len(set(found.values())) < 2  # others were refused when the engine was configured
        for spec in found.values():
            assert spec.block_size == block
            self._reach = -(-(spec.sliding_window - 1) // block)
            layout = cpu_attn._get_attn_isa(spec.dtype, block, spec.head_size)
            self.kind = f"windows {layout} {self._bits}".encode()

    # -- in the scheduler ---------------------------------------------------------------------------

    def first(self, place: int) -> int:
        """Of the blocks before this place, the first that a window reaches from there."""
        return max(0, place - self._reach)

    def due(self, start: int, stop: int, prompt: int, begun: int) -> list[int]:
        """The blocks to be stored when blocks ``start`` to ``stop`` of a sequence are filled.

        Args:
            prompt: tokens of its prompt. Whoever asks it again reads the last one anew.
            begun: tokens that it had before this step. Of those before their window vLLM has no pages now.
        """
        ends = {prompt // self._block, (prompt - 1) // self._block}
        places = range(max(start + 1, -(-begun // self._block)), stop + 1)
        wanted = [each for each in places if each % self._every == 0 or each in ends]
        return sorted({block for each in wanted for block in range(self.first(each), each)})

    # -- in the worker ------------------------------------------------------------------------------

    def pack(self, modules: Mapping[str, Any], pages: Iterable[int]) -> dict[str, Tensor]:
        """What is stored of a block that has these pages, one in each of the groups."""
        found = torch.stack([memory[page] for memory, page in self._memory(modules, pages)])
        try:
            return coded({_PAGES: found}, self._bits)
        except ValueError:  # NaN and infinity stay as they are, for whoever goes on from them
            return {_PAGES: found}

    def unpack(self, modules: Mapping[str, Any], pages: Iterable[int], stored: dict[str, Tensor]) -> None:
        """Write a stored block to its pages."""
        into = list(self._memory(modules, pages))
        for (memory, page), own in zip(into, decoded(stored)[_PAGES], strict=True):
            memory[page] = own

    def fits(self, modules: Mapping[str, Any], stored: dict[str, Tensor]) -> bool:
        """Whether this is a block of these layers."""
        each = [memory for memory, _ in self._memory(modules, [0] * len(self.groups))]
        return _PAGES in stored and stored[_PAGES].shape == (len(each), *each[0].shape[1:])

    def _memory(self, modules: Mapping[str, Any], pages: Iterable[int]) -> Iterable[tuple[Tensor, int]]:
        """Of each layer the memory of all its pages, and which one it is."""
        for names, page in zip(self._layers, pages, strict=True):
            yield from ((modules[name].kv_cache, page) for name in names)

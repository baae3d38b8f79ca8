"""What a connector stores of layers of which vLLM keeps the cache: sliding windows, or states, as Mamba and
linear attention have them.

Of a prefix they need what they hold at its end: the last tokens, or one state. So their pages are stored of
few blocks: those that a window reaches back to from a *checkpoint*, a place between two blocks from which a
prompt can go on, or the one block before it, whose page has the state there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from xquant.quant.states import coded, decoded
from xquant.serve.fit import ConnectorOptions


def spec_of(group: KVCacheGroupSpec) -> KVCacheSpec:
    """Of the layers of a group, which vLLM may wrap."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(group.layer_names[0], group.kv_cache_spec)


class Checkpoints:
    """The layers of an engine with sliding windows, all of one kind, or with states. Of a model without any,
    nothing is stored.

    Args:
        config: vLLM's, of all its groups of layers.
        block: tokens of a page.
    """

    def __init__(self, config: KVCacheConfig, options: ConnectorOptions, block: int) -> None:
        specs = [spec_of(each) for each in config.kv_cache_groups]
        found = {i: each for i, each in enumerate(specs) if isinstance(each, SlidingWindowSpec | MambaSpec)}
        self.groups = tuple(found)
        """Those of vLLM's groups of layers that these are in."""
        self._layers = [config.kv_cache_groups[i].layer_names for i in found]
        self._bits, self._block, self._reach = options.state_bits, block, 0
        self._every = max(1, options.every // block)
        self.kind = b""
        """What tells their pages apart from others of the same tokens and model."""
        kinds = set(found.values())
        self.of_states = any(isinstance(each, MambaSpec) for each in kinds)
        assert len(kinds) < 2 or all(isinstance(each, MambaSpec) for each in kinds)  # checked before
        assert all(each.block_size == block for each in kinds)
        for spec in kinds:
            if isinstance(spec, SlidingWindowSpec):
                self._reach = -(-(spec.sliding_window - 1) // block)
                layout = cpu_attn._get_attn_isa(spec.dtype, block, spec.head_size)
                self.kind = f"windows {layout} {self._bits}".encode()
        if self.of_states:
            shapes = [(spec.shapes, spec.dtypes) for spec in found.values() if isinstance(spec, MambaSpec)]
            self._reach, self.kind = 1, f"states {shapes} {self._bits}".encode()

    # -- in the scheduler ---------------------------------------------------------------------------

    def first(self, place: int) -> int:
        """Of the blocks before this place, the first that is needed to go on from there."""
        return max(0, place - self._reach)

    def due(self, start: int, stop: int, prompt: int, begun: int, ended: int) -> list[int]:
        """The blocks to be stored when blocks ``start`` to ``stop`` of a sequence are filled.

        Args:
            prompt: tokens of its prompt. Whoever asks it again reads the last one anew.
            begun: tokens that it had before this step. Of those before their window vLLM has no pages now.
            ended: tokens that it has after it. Of states vLLM has that one.
        """
        ends = {prompt // self._block, (prompt - 1) // self._block}
        first = ended if self.of_states else max((start + 1) * self._block, begun)
        places = range(-(-first // self._block), stop + 1)
        wanted = [each for each in places if each % self._every == 0 or each in ends]
        return sorted({block for each in wanted for block in range(self.first(each), each)})

    # -- in the worker ------------------------------------------------------------------------------

    def pack(self, modules: Mapping[str, Any], pages: Iterable[int]) -> dict[str, Tensor]:
        """What is stored of a block that has these pages, one in each of the groups."""
        layers = [[each[page] for each in memory] for memory, page in self._memory(modules, pages)]
        found = {str(i): torch.stack(each) for i, each in enumerate(zip(*layers, strict=True))}
        try:
            return coded(found, self._bits)
        except ValueError:  # NaN and infinity stay as they are, for whoever goes on from them
            return found

    def unpack(self, modules: Mapping[str, Any], pages: Iterable[int], stored: dict[str, Tensor]) -> None:
        """Write a stored block to its pages."""
        found = decoded(stored)
        for layer, (memory, page) in enumerate(self._memory(modules, pages)):
            for i, each in enumerate(memory):
                each[page] = found[str(i)][layer]

    def fits(self, modules: Mapping[str, Any], stored: dict[str, Tensor]) -> bool:
        """Whether this is a block of these layers."""
        every = [memory for memory, _ in self._memory(modules, [0] * len(self.groups))]
        shapes = {str(i): (len(every), *each.shape[1:]) for i, each in enumerate(every[0])}
        return all(name in stored and stored[name].shape == shape for name, shape in shapes.items())

    def _memory(
        self, modules: Mapping[str, Any], pages: Iterable[int]
    ) -> Iterable[tuple[Sequence[Tensor], int]]:
        """Of each layer the memory of all its pages, of states in parts, and which page it is."""
        for names, page in zip(self._layers, pages, strict=True):
            for name in names:
                held = modules[name].kv_cache
                yield ([held] if isinstance(held, Tensor) else held), page

"""Contenders: caches filled with random states, whose decoding is timed."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from xquant import compat
from xquant.cache.growing import KVCache
from xquant.cache.static import StaticKVCache
from xquant.kernels.call import AttentionCall
from xquant.kernels.trial import random_states
from xquant.linear import pack_weights
from xquant.linear.layer import PackedLinear
from xquant.methods import Method
from xquant.models import AttentionView
from xquant.steps import compile_steps, has_compiled_steps

from ..pyramid import Pyramid
from ..pyramid.cache import PyramidCache

FILL = 4096
"""Tokens of a sequence that are appended at a time, at most."""
FILLED_ROWS = 8 * FILL
"""Tokens of all sequences together that are appended at a time, at most."""
STATIC = "static"
"""What the row of a `StaticKVCache` is called, after its method."""


class Contender(ABC):
    """A cache of a model that holds ``context`` tokens and decodes the next."""

    name: str
    model: Any
    dtype: torch.dtype
    setting: str
    cache: Any
    alone: bool = True
    """Whether its attention can be timed apart from the rest of a step."""
    packed: bool = False
    """Whether steps run with packed weights."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Resident bytes of the whole cache."""

    @abstractmethod
    def attend(self) -> None:
        """Compute the attention of one token in every layer, and nothing else."""

    def step(self) -> None:
        """Decode one token."""
        ids = torch.zeros(self.batch, 1, dtype=torch.long, device=self.model.device)
        self.run(ids, **{compat.CACHE: self.cache}, use_cache=True, logits_to_keep=1)

    @property
    def run(self) -> Any:
        """The model as steps call it."""
        return self.model if self._compiled is None else self._compiled

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled."""
        return self._compiled is not None or has_compiled_steps(self.model)

    def rewind(self) -> None:
        """Called after its turn: has a cache that others share hold what it held before."""
        # A step puts new tensors in the place of those that are held, and does not write to them.
        for layer, held in zip(self.cache.layers if self._held else (), self._held, strict=True):
            vars(layer).update(held)

    def prepare(self, packed: bool, compiled: bool, **how: Any) -> None:
        """Say whether the model's weights are packed, and have steps run compiled: by `compile_steps`, or by
        ``torch.compile`` as ``how`` says."""
        self.packed = packed
        if compiled and how:
            self._compiled = torch.compile(self.model, **how)
        elif compiled and not has_compiled_steps(self.model):
            compile_steps(self.model)

    def newest(self) -> tuple[Tensor, Tensor, Tensor]:
        """A random query ``[B, H, 1, D]``, and the key and value ``[B, G, 1, D]`` of its token."""
        queries, heads, size = head_sizes(self.model)
        query, key, value = (
            torch.randn(self.batch, h, 1, size, dtype=self.dtype, device=self.model.device)
            for h in (queries, heads, heads)
        )
        return query, key, value

    @property
    def batch(self) -> int:
        return self._batch

    _batch: int
    _compiled: Any = None
    _held: Sequence[dict[str, Any]] = ()
    """The layers of a cache that others share, as they were."""

    @property
    def device(self) -> torch.device:
        """The device of the model; the CPU where there is no model of torch."""
        return torch.device("cpu") if self.model is None else self.model.device


class Peer(Contender):
    """A cache of another package: whole steps alone are timed."""

    alone = False

    def attend(self) -> None:
        raise NotImplementedError(f"{self.name} attends in whole steps alone")


class Compressed(Contender):
    """A method's cache."""

    def __init__(
        self, model: Any, method: Method, context: int, batch: int, calibration: Any, kernel: str
    ) -> None:
        self.name, self.model, self._batch = method.spec, model, batch
        self.cache = KVCache(model, method, calibration=calibration, kernel=kernel)
        self.setting = self.cache.report().kernel
        self.dtype = self.cache.compressed[0].codec.view.dtype
        fill(self.cache, context, batch)
        self._newest = self.newest()

    @property
    def cache_bytes(self) -> int:
        return self.cache.report().cache_bytes

    def attend(self) -> None:
        query, key, value = self._newest
        scaling = query.shape[-1] ** -0.5
        call = AttentionCall(query, key, value, None, scaling, None)
        for layer in self.cache.compressed:
            index = layer.codec.view.index
            layer.accumulate()
            if self.cache.attend(index, call) is None:
                keys, values, mask = self.cache.answer(index, key, value, None)
                own = compat.attention_function("sdpa", layer.codec.view.module)
                own(layer.codec.view.module, query, keys, values, mask, scaling=scaling)
        self.cache.finish()


class Dropping(Contender):
    """The cache of a method that drops tokens. It is filled with all of them, and drops them at once."""

    def __init__(self, model: Any, method: Pyramid, context: int, batch: int) -> None:
        self.name, self.model, self._batch = method.spec, model, batch
        self.cache = PyramidCache(model, method)
        self.setting = self.cache.report().kernel
        self.dtype = self.cache.evicting[0].view.dtype
        positions = torch.arange(context, device=self.device).expand(batch, -1)
        self.cache.index.append(positions, torch.ones_like(positions, dtype=torch.bool))
        for layer in self.cache.evicting:
            states = random_states(layer.view, batch, context)
            layer.update(states.key, states.value)
        self.cache.finish()
        self._newest = self.newest()

    @property
    def cache_bytes(self) -> int:
        return self.cache.report().cache_bytes

    def attend(self) -> None:
        query = self._newest[0]
        for layer in self.cache.evicting:
            own = compat.attention_function("sdpa", layer.view.module)
            scaling = query.shape[-1] ** -0.5
            own(layer.view.module, query, layer.keys, layer.values, None, scaling=scaling)


def contender_of(
    model: Any, method: Method, context: int, batch: int, calibration: Any, kernel: str
) -> Contender:
    """The contender of any method."""
    if isinstance(method, Pyramid):
        return Dropping(model, method, context, batch)
    return Compressed(model, method, context, batch, calibration, kernel)


class Static(Contender):
    """A method's cache in memory of a fixed size."""

    def __init__(
        self,
        model: Any,
        method: Method,
        size: tuple[int, int],
        steps: int,
        calibration: Any,
        kernel: str,
    ) -> None:
        self.name, self.model = f"{method.spec} {STATIC}", model
        context, self._batch = size
        room = context + 2 * steps  # every job takes a step before the one that is timed
        self.cache = StaticKVCache(model, method, room, calibration=calibration, kernel=kernel)
        self.setting = self.cache.kernel
        self.dtype = self.cache.layers[0].codec.view.dtype
        for count in pieces(context, self._batch, method.group):
            self.cache.fill(partial(self._states, count), self._batch, count)
        self._newest = self.newest()

    def _states(self, count: int, view: AttentionView) -> tuple[Tensor, Tensor]:
        found = random_states(view, self._batch, count)
        return found.key, found.value

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def attend(self) -> None:
        query, key, value = self._newest
        call = AttentionCall(query, key, value, None, query.shape[-1] ** -0.5, None)
        self.cache.attend_alone(call)


class Full(Contender):
    """transformers' own uncompressed cache, with one of its attention implementations.

    Args:
        cache: `random_cache`, which several share; by default one of its own.
    """

    name = "full"

    def __init__(
        self, model: Any, attention: str, context: int, batch: int, cache: DynamicCache | None = None
    ) -> None:
        self.model, self._batch, self.setting = model, batch, attention
        self.dtype = next(model.parameters()).dtype
        self.cache = random_cache(model, context, batch) if cache is None else cache
        self._held = [] if cache is None else [dict(vars(layer)) for layer in cache.layers]
        self._newest = self.newest()
        config = compat.text_config(model)
        config._attn_implementation = attention

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def attend(self) -> None:
        query = self._newest[0]
        for module in attentions(self.model):
            layer = self.cache.layers[module.layer_idx]
            own = compat.attention_function(self.setting, module)
            own(module, query, layer.keys, layer.values, None, scaling=query.shape[-1] ** -0.5)


def random_cache(model: Any, context: int, batch: int) -> DynamicCache:
    """transformers' own cache with ``context`` random tokens in every layer, in the model's dtype."""
    cache = DynamicCache(config=model.config)
    _, heads, size = head_sizes(model)
    shape = batch, heads, context, size
    dtype = next(model.parameters()).dtype
    for i in range(len(cache.layers)):
        cache.update(*(torch.randn(shape, dtype=dtype, device=model.device) for _ in range(2)), i)
    return cache


def grouped(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The fastest known form of attention in plain torch: a batched product for each key/value head with
    all of its query heads.

    Args:
        query: ``[B, H, 1, D]``.
        keys, values: ``[B, G, T, D]``.
    """
    batch, heads, tokens, size = keys.shape
    keys, values = (t.view(batch * heads, tokens, size) for t in (keys, values))
    scores = torch.bmm(query.view(batch * heads, -1, size), keys.mT).float() * size**-0.5
    return torch.bmm(scores.softmax(-1).to(values.dtype), values)


class Grouped(Full):
    """The full cache with `grouped` attention, which transformers does not have."""

    name = "torch-grouped"

    def attend(self) -> None:
        for layer in self.cache.layers:
            grouped(self._newest[0], layer.keys, layer.values)


def fill(cache: KVCache, context: int, batch: int) -> None:
    """Give an empty cache ``context`` tokens with random states, without running the model."""
    start = 0
    device = cache.compressed[0].codec.view.device
    for length in pieces(context, batch, cache.method.group):
        positions = torch.arange(start, start + length, device=device).expand(batch, -1)
        cache.index.append(positions, torch.ones_like(positions, dtype=torch.bool))
        for layer in cache.compressed:
            layer.append(random_states(layer.codec.view, batch, length))
            layer.release_below()  # as in a forward pass
        for layer in cache.compressed:
            layer.release()
        start += length


def pieces(context: int, batch: int, block: int) -> list[int]:
    """How many tokens are appended at a time to have ``context`` of them, in blocks of ``block``."""
    piece = min(FILL, max(FILLED_ROWS // batch // block, 1) * block)
    return [min(piece, context - start) for start in range(0, context, piece)]


def head_sizes(model: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and the size of a head."""
    config: Any = compat.text_config(model)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, config.num_key_value_heads, size


def attentions(model: Any) -> list[Any]:
    """The attention modules of a model."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]


class Models:
    """Copies of a model by dtype, with its weights as they are or packed; copies of one kind share them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._made: dict[tuple[torch.dtype, bool, bool], Any] = {}

    def plain(self, dtype: torch.dtype, packed: bool = False) -> Any:
        """A new copy with a configuration of its own, for the full cache: it has no hooks of ours."""
        return _copy(self._shared(dtype, packed), dtype)

    def attached(self, dtype: torch.dtype, packed: bool = False) -> Any:
        """The copy that compressed caches share, so that they prepare what they need of its weights once."""
        return self._shared(dtype, packed, attached=True)

    def _shared(self, dtype: torch.dtype, packed: bool, attached: bool = False) -> Any:
        kind = dtype, packed, attached
        if kind not in self._made:
            if attached:
                made = self.plain(dtype, packed)
            elif packed:
                made = self.plain(dtype)
                pack_weights(made)
            else:
                made = _copy(self.model, dtype)
            self._made[kind] = made
        return self._made[kind]


def _copy(model: Any, dtype: torch.dtype) -> Any:
    """The model in ``dtype``, with a configuration of its own; weights are shared where they can be."""
    held = [*model.parameters(), *model.buffers()] if model.dtype == dtype else []
    held += [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    memo = {id(each): each for each in held}
    made = copy.deepcopy(model, memo)
    if made.dtype != dtype:
        compat.cast(made, dtype)
    return made

"""The uncompressed cache on a GPU with every known kernel for its attention. No step copies its states. A
compressed cache is measured against the fastest of them."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .contenders import Contender, grouped, head_sizes

PAGE = 16
"""Tokens of a page of FlashInfer."""
WORKSPACE = 128 << 20
"""Bytes of FlashInfer's workspace, as its documentation recommends."""
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Backends of torch's attention."""

Attend = Callable[[Tensor, Tensor, Tensor], Any]
"""Called with a query ``[B, H, 1, D]``, keys and values ``[B, G, T, D]``."""
Maker = Callable[[Tensor, Tensor], Attend]
"""Called with a query and keys like those to come. Raises what the library raises where it cannot be used."""


class PreallocatedLayer(DynamicLayer):
    """Keys and values at the start of larger tensors ``[B, G, room, D]``: new tokens are written behind
    them."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        super().__init__()
        self._room = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._see(tokens)

    def _see(self, tokens: int) -> None:
        self.keys, self.values = (room[:, :, :tokens] for room in self._room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        stop = start + key_states.shape[2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:stop] = states
        self._see(stop)
        return self.keys, self.values


def filled(model: Any, dtype: torch.dtype, context: int, batch: int, room: int = 0) -> DynamicCache:
    """The model's own cache with ``context`` random tokens in every layer, and memory for ``room`` more."""
    cache = DynamicCache(config=model.config)
    _, heads, size = head_sizes(model)
    shape = batch, heads, context + room, size
    for i, layer in enumerate(cache.layers):
        keys, values = (torch.randn(shape, dtype=dtype, device=model.device) for _ in range(2))
        if type(layer) is DynamicLayer:
            cache.layers[i] = PreallocatedLayer(keys, values, context)
        else:
            layer.update(keys[:, :, :context], values[:, :, :context])
    return cache


class Flash(Contender):
    """The full cache with one of `KERNELS`; several may share a ``cache``."""

    name = "full"

    def __init__(self, model: Any, cache: DynamicCache, kernel: str) -> None:
        self.model, self.cache, self.setting = model, cache, kernel
        keys = cache.layers[0].keys
        assert keys is not None
        self.dtype, self._batch = keys.dtype, keys.shape[0]
        self._query = self.newest()[0]
        self._attend = KERNELS[kernel](self._query, keys)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def attend(self) -> None:
        for layer in self.cache.layers:
            self._attend(self._query, layer.keys, layer.values)


class Stepping(Flash):
    """The full cache with one of `BACKENDS`, as transformers calls torch's attention: it decodes whole
    tokens, too."""

    def __init__(self, model: Any, cache: DynamicCache, kernel: str) -> None:
        super().__init__(model, cache, kernel)
        self._backend = BACKENDS[kernel]

    def step(self) -> None:
        with sdpa_kernel(self._backend):
            super().step()


def _sdpa(backend: SDPBackend, packed: bool, query: Tensor, keys: Tensor) -> Attend:
    """torch's attention. ``packed`` gives the query heads of a key/value head as so many queries, for
    backends that do not know grouped heads."""

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if packed:
            query = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=not packed)

    return attend


def _flash_attention(package: str, query: Tensor, keys: Tensor) -> Attend:
    """flash-attn: the package ``flash_attn`` is version 2, ``flash_attn_interface`` version 3."""
    function = import_module(package).flash_attn_with_kvcache

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Any:
        return function(*(t.transpose(1, 2) for t in (query, keys, values)))

    return attend


def _flashinfer_single(tensor_cores: bool, query: Tensor, keys: Tensor) -> Attend:
    function = import_module("flashinfer").single_decode_with_kv_cache
    if len(query) > 1:
        raise ValueError("it takes one sequence")

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Any:
        return function(query[0, :, 0], keys[0], values[0], kv_layout="HND", use_tensor_cores=tensor_cores)

    return attend


def _flashinfer_batch(tensor_cores: bool, query: Tensor, keys: Tensor) -> Attend:
    """FlashInfer on pages. It reads the states as if they lay in pages, which random ones may."""
    flashinfer = import_module("flashinfer")
    batch, heads, tokens, size = keys.shape
    pages = tokens // PAGE
    if tokens % PAGE:
        raise ValueError(f"{tokens} tokens are no whole pages of {PAGE}")
    options: dict[str, Any] = {"dtype": torch.int32, "device": keys.device}
    begins = torch.arange(batch + 1, **options) * pages
    numbers, last = torch.arange(batch * pages, **options), torch.full((batch,), PAGE, **options)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=keys.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=begins.clone(),
        paged_kv_indices_buffer=numbers.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    types = {"q_data_type": query.dtype, "kv_data_type": keys.dtype}
    wrapper.plan(begins, numbers, last, query.shape[1], heads, size, PAGE, **types)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Any:
        paged = tuple(t.view(-1, heads, PAGE, size) for t in (keys, values))
        return wrapper.run(query[:, :, 0], paged)

    return attend


def _grouped(query: Tensor, keys: Tensor) -> Attend:
    return grouped


KERNELS: dict[str, Maker] = {
    **{name: partial(_sdpa, backend, False) for name, backend in BACKENDS.items()},
    **{f"{name} packed": partial(_sdpa, backend, True) for name, backend in BACKENDS.items()},
    "torch grouped": _grouped,
    "flash-attn 2": partial(_flash_attention, "flash_attn"),
    "flash-attn 3": partial(_flash_attention, "flash_attn_interface"),
    "flashinfer single": partial(_flashinfer_single, False),
    "flashinfer single, tensor cores": partial(_flashinfer_single, True),
    "flashinfer": partial(_flashinfer_batch, False),
    "flashinfer, tensor cores": partial(_flashinfer_batch, True),
}
"""Kernels of packages that are not installed raise when they are made."""

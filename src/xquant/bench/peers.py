"""Caches of other packages, which are timed beside ours where they are installed."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import QuantizedCache

from .contenders import FILL, Contender
from .trials import Settings

Maker = Callable[[Settings], Contender]


def available(model: str, network: Any) -> list[Maker]:
    """Makers of the contenders whose packages are installed, for the model of this name."""
    found: list[Maker] = []
    for backend, package in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        if _installed(package):
            found.append(partial(Quantized, network, backend))
    if model == "smollm2" and _installed("llama_cpp"):
        found.append(LlamaCpp)
    return found


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


class Quantized(Contender):
    """transformers' QuantizedCache at 4 bits, which decodes the whole cache at every step."""

    alone = False

    def __init__(self, network: Any, backend: str, settings: Settings) -> None:
        self.model, self._batch, self.dtype = network, settings.batch, network.dtype
        self.name = f"QuantizedCache-{backend}-4bit"
        self.setting = "sdpa"
        self.cache = QuantizedCache(backend, network.config, nbits=4)
        _, key, _ = self.newest()
        shape = (settings.batch, key.shape[1], settings.context, key.shape[3])
        for i in range(len(self.cache.layers)):
            states = (torch.randn(shape, device=network.device) for _ in range(2))
            self.cache.update(*states, i)

    @property
    def cache_bytes(self) -> int:
        return sum(held_bytes(layer.__dict__) for layer in self.cache.layers)

    def attend(self) -> None:
        pass


def held_bytes(thing: Any) -> int:
    """Bytes of the tensors in ``thing``: those of codes and scales where one of quanto's holds such."""
    if isinstance(thing, torch.Tensor):
        inner = [
            getattr(thing, name) for name in ("_data", "_scale", "_shift") if hasattr(thing, name)
        ]
        return sum(map(held_bytes, inner)) if inner else thing.nbytes
    if isinstance(thing, dict):
        return sum(map(held_bytes, thing.values()))
    return sum(map(held_bytes, thing)) if isinstance(thing, list | tuple) else 0


class LlamaCpp(Contender):
    """llama.cpp on the packaged GGUF, with f16 keys and values and flash attention."""

    model, dtype, alone = None, torch.float16, False

    def __init__(self, settings: Settings) -> None:
        import llama_cpp

        from ..load import packaged_gguf

        self._batch = 1
        self.name = "llama.cpp-f16"
        self.setting = f"flash attention, {importlib.metadata.version('llama-cpp-python')}"
        threads = torch.get_num_threads()
        self._model = llama_cpp.Llama(
            str(packaged_gguf()),
            n_ctx=settings.context + 256,
            n_batch=FILL,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        # Its cache can only be filled by running the model over a prompt.
        self._model.eval([1000 + i % 5000 for i in range(settings.context)])
        self._size = 2 * 2 * 30 * 3 * 64 * settings.context

    @property
    def cache_bytes(self) -> int:
        return self._size

    def step(self) -> None:
        self._model.eval([1000])

    def attend(self) -> None:
        pass

"""Caches of other packages, which are timed beside ours where they are installed."""

import importlib.util
from functools import partial
from typing import Any

import torch
from transformers import QuantizedCache

from . import llama_cpp, onnx_runtime, openvino
from .contenders import Peer
from .trials import Maker, Settings


def available(model: str, network: Any, batch: int = 1) -> dict[str, Maker]:
    """Makers of the contenders whose packages are installed, by what they are called while they are filled.

    Engines run the packaged model from its own file, one sequence at a time, on a CPU.

    Args:
        model: its name.
    """
    found: dict[str, Maker] = {}
    for backend, package in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        if _installed(package):
            found[f"QuantizedCache, {backend}"] = partial(Quantized, network, backend)
    if model != "smollm2" or network.device.type != "cpu" or batch > 1:
        return found
    if _installed("llama_cpp"):
        for form, flash in llama_cpp.SETTINGS:
            name = f"llama.cpp, {form}" + ", flash attention" * flash
            found[name] = partial(llama_cpp.LlamaCpp, network, form, flash)
    if all(map(_installed, openvino.PACKAGES)):
        for precision in openvino.BITS:
            found[f"openvino, {precision}"] = partial(openvino.OpenVino, network, precision)
    if all(map(_installed, onnx_runtime.PACKAGES)):
        found["onnxruntime"] = partial(onnx_runtime.OnnxRuntime, network)
    return found


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


class Quantized(Peer):
    """transformers' QuantizedCache at 4 bits, which decodes the whole cache at every step."""

    def __init__(self, network: Any, backend: str, settings: Settings) -> None:
        self.model, self._batch, self.dtype = network, settings.batch, network.dtype
        self.name = f"QuantizedCache-{backend}-4bit"
        self.setting = "sdpa"
        self.cache = QuantizedCache(backend, network.config, nbits=4)
        _, key, _ = self.newest()
        shape = (settings.batch, key.shape[1], settings.context, key.shape[3])
        for i in range(len(self.cache.layers)):
            states = (torch.randn(shape, device=network.device, dtype=torch.float32) for _ in range(2))
            self.cache.update(*states, i)

    @property
    def cache_bytes(self) -> int:
        return sum(held_bytes(layer.__dict__) for layer in self.cache.layers)


def held_bytes(thing: Any) -> int:
    """Bytes of the tensors in ``thing``: those of codes and scales where one of quanto's holds such."""
    if isinstance(thing, torch.Tensor):
        inner = [getattr(thing, name) for name in ("_data", "_scale", "_shift") if hasattr(thing, name)]
        return sum(map(held_bytes, inner)) if inner else thing.nbytes
    if isinstance(thing, dict):
        return sum(map(held_bytes, thing.values()))
    return sum(map(held_bytes, thing)) if isinstance(thing, list | tuple) else 0

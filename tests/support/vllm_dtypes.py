"""What stands in for vLLM 0.33's registry of KV cache dtypes: the same functions, and what they promise."""

import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest


class KVQuantMode(IntEnum):
    """The modes that a handler may answer with, but for vLLM's own formats."""

    NONE = 0
    CUSTOM = 12


class Registry(ModuleType):
    """``vllm.config.cache``, of a process that has just started."""

    def __init__(self) -> None:
        super().__init__("vllm.config.cache")
        self.known = ["auto", "bfloat16", "fp8"]
        self.handlers: dict[str, Any] = {}
        self.storage: dict[str, Any] = {}
        """What vLLM looks a dtype of torch up in."""

    def register_kv_cache_dtype(self, name: str) -> Callable[[type], type]:
        def take(kind: type) -> type:
            assert name not in self.known  # vLLM would warn, and take the new handler
            self.handlers[name] = handler = kind()
            assert handler.name == name
            self.storage[name] = handler.torch_dtype()
            self.known.append(name)
            return kind

        return take

    def get_kv_cache_dtype_handler(self, name: str) -> Any:
        return self.handlers.get(name)

    def is_known_kv_cache_dtype(self, name: str) -> bool:
        return name in self.known


def stand_in(patch: pytest.MonkeyPatch, registry: ModuleType) -> None:
    """Let ``vllm.config`` have this module for ``cache``, whether or not vLLM is installed."""
    config, modes = ModuleType("vllm.config"), ModuleType("vllm.v1.kv_cache_interface")
    config.cache, modes.KVQuantMode = registry, KVQuantMode  # type: ignore[attr-defined]
    for module in (config, modes):
        patch.setitem(sys.modules, module.__name__, module)

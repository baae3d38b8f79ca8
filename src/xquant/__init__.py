"""KV-cache compression for Hugging Face transformers.

The public names are imported when they are first used, so that ``import xquant`` (and with it
``xquant --help``) does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import attach, detach
    from .cache import KVCache
    from .load import load_model
    from .methods import Full, Kivi, Method, XQuant, XQuantCL
    from .report import Report
    from .spec import parse_method

__version__ = "0.1.0"

__all__ = [
    "Full",
    "KVCache",
    "Kivi",
    "Method",
    "Report",
    "XQuant",
    "XQuantCL",
    "attach",
    "detach",
    "load_model",
    "parse_method",
]

_HOMES = {
    **dict.fromkeys(("attach", "detach"), "attention"),
    **dict.fromkeys(("Full", "Kivi", "Method", "XQuant", "XQuantCL"), "methods"),
    "KVCache": "cache",
    "Report": "report",
    "load_model": "load",
    "parse_method": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xquant' has no attribute '{name}'")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""KV-cache compression for Hugging Face transformers."""

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

"""One file a method; `METHODS` lists them by the name that a spec starts with."""

from .base import LayerCodec, Method, QuantizedMethod, Seen
from .full import Full
from .kivi import Kivi
from .xquant import XQuant
from .xquant_cl import XQuantCL

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Full, Kivi, XQuant, XQuantCL)}

__all__ = [
    "METHODS",
    "Full",
    "Kivi",
    "LayerCodec",
    "Method",
    "QuantizedMethod",
    "Seen",
    "XQuant",
    "XQuantCL",
]

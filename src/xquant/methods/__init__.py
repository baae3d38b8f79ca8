"""One file a method; `METHODS` has them by the name that a spec starts with.

Methods and their options are known without torch. What codecs are made of (`codec`, the files ``*_codec``)
needs it, and is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from .asymkv import AsymKV
from .base import Method, QuantizedMethod
from .crosslayer import CrossLayer
from .full import Full
from .kivi import Kivi
from .kvarn import KVarN
from .kvlinc import KVLinC
from .kvquant import KVQuant
from .kvtc import KVTC
from .llama_cpp import LlamaCpp
from .oscar import Oscar
from .plain_formats import Integer, NormalFloat
from .quarot import QuaRot
from .registry import METHODS, find_installed, load_file, register
from .transform import PredictedTransform, Transform
from .turboquant import TurboQuant
from .xquant import XQuant
from .xquant_cl import XQuantCL

if TYPE_CHECKING:
    from .codec import AttentionInputs, LayerCodec

for _method in (
    *(Full, Integer, NormalFloat, LlamaCpp, Kivi, AsymKV, CrossLayer, KVQuant),
    *(
        QuaRot,
        TurboQuant,
        KVarN,
        KVLinC,
        Oscar,
        KVTC,
        XQuant,
        XQuantCL,
        Transform,
        PredictedTransform,
    ),
):
    register(_method)

__all__ = [
    "KVTC",
    "METHODS",
    "AsymKV",
    "AttentionInputs",
    "CrossLayer",
    "Full",
    "Integer",
    "KVLinC",
    "KVQuant",
    "KVarN",
    "Kivi",
    "LayerCodec",
    "LlamaCpp",
    "Method",
    "NormalFloat",
    "Oscar",
    "PredictedTransform",
    "QuaRot",
    "QuantizedMethod",
    "Transform",
    "TurboQuant",
    "XQuant",
    "XQuantCL",
    "find_installed",
    "load_file",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in ("AttentionInputs", "LayerCodec"):
        raise AttributeError(f"module 'xquant.methods' has no attribute '{name}'")
    from . import codec

    return getattr(codec, name)

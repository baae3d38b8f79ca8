"""One file a method: its options and its codec. `METHODS` has them by the name that a spec starts with."""

from .asymkv import AsymKV
from .base import Method, QuantizedMethod, option
from .codec import AttentionInputs, LayerCodec
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
from .transform import Transform
from .transform_cl import PredictedTransform
from .turboquant import TurboQuant
from .xquant import XQuant
from .xquant_cl import XQuantCL

for _method in (
    *(Full, Integer, NormalFloat, LlamaCpp, Kivi, AsymKV, CrossLayer, KVQuant),
    *(QuaRot, TurboQuant, KVarN, KVLinC, Oscar, KVTC, XQuant, XQuantCL),
    *(Transform, PredictedTransform),
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
    "option",
    "register",
]

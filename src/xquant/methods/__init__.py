"""One file a method; `METHODS` lists them by the name that a spec starts with."""

from .asymkv import AsymKV
from .base import AttentionInputs, LayerCodec, Method, QuantizedMethod
from .crosslayer import CrossLayer
from .full import Full
from .kivi import Kivi
from .kvquant import KVQuant
from .plain_formats import Integer, NormalFloat
from .transform import PredictedTransform, Transform
from .xquant import XQuant
from .xquant_cl import XQuantCL

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        Full,
        Integer,
        NormalFloat,
        Kivi,
        AsymKV,
        CrossLayer,
        KVQuant,
        XQuant,
        XQuantCL,
        Transform,
        PredictedTransform,
    )
}

__all__ = [
    "METHODS",
    "AsymKV",
    "AttentionInputs",
    "CrossLayer",
    "Full",
    "Integer",
    "KVQuant",
    "Kivi",
    "LayerCodec",
    "Method",
    "NormalFloat",
    "PredictedTransform",
    "QuantizedMethod",
    "Transform",
    "XQuant",
    "XQuantCL",
]

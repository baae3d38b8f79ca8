"""KV-cache compression for Hugging Face transformers.

The public names are imported when they are first used, so that ``import xquant`` (and with it
``xquant --help``) does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from .cache.growing import KVCache
    from .cache.implicit import compress, compressed, decompress
    from .cache.static import StaticKVCache
    from .calibration import Calibration
    from .calibrators.run import calibrate, own_calibration
    from .contents.report import Report
    from .linear import pack_weights, unpack_weights
    from .load import load_model
    from .methods import (
        KVTC,
        AsymKV,
        CrossLayer,
        Full,
        Integer,
        Kivi,
        KVarN,
        KVLinC,
        KVQuant,
        Lattice,
        LlamaCpp,
        Method,
        NormalFloat,
        NvFp4,
        Oscar,
        PairCodes,
        PredictedTransform,
        QuaRot,
        Transform,
        TurboQuant,
        XQuant,
        XQuantCL,
        register,
    )
    from .prefixes import PrefixStore
    from .saved.resting import SavedCache
    from .seam.hooks import attach, detach
    from .spec import parse_method
    from .steps import compile_steps, uncompile_steps

__version__ = "0.1.0"

__all__ = [
    "KVTC",
    "AsymKV",
    "Calibration",
    "CrossLayer",
    "Full",
    "Integer",
    "KVCache",
    "KVLinC",
    "KVQuant",
    "KVarN",
    "Kivi",
    "Lattice",
    "LlamaCpp",
    "Method",
    "NormalFloat",
    "NvFp4",
    "Oscar",
    "PairCodes",
    "PredictedTransform",
    "PrefixStore",
    "QuaRot",
    "Report",
    "SavedCache",
    "StaticKVCache",
    "Transform",
    "TurboQuant",
    "XQuant",
    "XQuantCL",
    "attach",
    "calibrate",
    "compile_steps",
    "compress",
    "compressed",
    "decompress",
    "detach",
    "load_model",
    "own_calibration",
    "pack_weights",
    "parse_method",
    "register",
    "uncompile_steps",
    "unpack_weights",
]

# Of all names but those of `methods`.
_HOMES = {
    **dict.fromkeys(("attach", "detach"), "seam.hooks"),
    "Calibration": "calibration",
    "KVCache": "cache.growing",
    "Report": "contents.report",
    **dict.fromkeys(("compress", "compressed", "decompress"), "cache.implicit"),
    **dict.fromkeys(("calibrate", "own_calibration"), "calibrators.run"),
    "PrefixStore": "prefixes",
    "SavedCache": "saved.resting",
    "StaticKVCache": "cache.static",
    "load_model": "load",
    **dict.fromkeys(("pack_weights", "unpack_weights"), "linear"),
    **dict.fromkeys(("compile_steps", "uncompile_steps"), "steps"),
    "parse_method": "spec",
}


def __getattr__(name: str) -> Any:
    if name == "Pyramid":
        return _of_the_laboratory(name)
    if name not in __all__:
        raise AttributeError(f"module 'xquant' has no attribute '{name}'")
    return getattr(import_module(f".{_HOMES.get(name, 'methods')}", __name__), name)


def _of_the_laboratory(name: str) -> Any:
    """A class that was a public name here before the laboratory had it."""
    warn(f"xquant.{name} is in xquant_lab now", DeprecationWarning, stacklevel=3)
    try:
        return type(__getattr__("parse_method")(name.lower()))
    except ValueError as error:
        raise AttributeError(f"module 'xquant' has no attribute '{name}': {error}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""One file a method: its options and its codec. `METHODS` has them by the name that a spec starts with.

Every method that is imported here can be named by specs. They are listed in this order.
"""
# Sorted by name they would be listed in another order.
# ruff: noqa: I001

from .base import Method as Method, QuantizedMethod as QuantizedMethod, option as option
from .codec import AttentionInputs as AttentionInputs, LayerCodec as LayerCodec
from .registry import METHODS as METHODS, register as register
from .registry import find_installed as find_installed, load_file as load_file

from .full import Full as Full
from .plain_formats import Integer as Integer, NormalFloat as NormalFloat
from .llama_cpp import LlamaCpp as LlamaCpp
from .nvfp4 import NvFp4 as NvFp4
from .kivi import Kivi as Kivi
from .asymkv import AsymKV as AsymKV
from .crosslayer import CrossLayer as CrossLayer
from .kvquant import KVQuant as KVQuant
from .quarot import QuaRot as QuaRot
from .turboquant import TurboQuant as TurboQuant
from .pairs import PairCodes as PairCodes
from .e8 import Lattice as Lattice
from .kvarn import KVarN as KVarN
from .kvlinc import KVLinC as KVLinC
from .oscar import Oscar as Oscar
from .kvtc import KVTC as KVTC
from .xquant import XQuant as XQuant
from .xquant_cl import XQuantCL as XQuantCL
from .transform import Transform as Transform
from .transform_cl import PredictedTransform as PredictedTransform

for _class in [*vars().values()]:
    if isinstance(_class, type) and issubclass(_class, Method) and hasattr(_class, "example"):
        register(_class)

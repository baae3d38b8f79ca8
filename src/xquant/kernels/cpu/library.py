"""The native library: where it is, what this CPU can run of it, and its C interface (``csrc/xquant.h``).

A structure here is the one there of the same name: `RebuildSum` is ``xq_rebuild_sum``. None has attributes
beside its fields: a name that is not a field is an error, and not a value that the library never sees.
"""

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ISAS = {"avx512": 2, "avx2": 1, "neon": 4}
"""Instruction sets, best first, with their bits in ``xq_isas``."""
MACHINES = ("x86_64", "aarch64")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}

INTERFACE = 2
"""As ``xq_interface`` in csrc/native.cpp."""

NOT_BUILT = "installed without the native library"
OTHER_MACHINE = "the native kernels are for Linux on x86-64 and AArch64 only"

_FILE = "libxquant_kernels.so"
_FOUND_NAN = 1  # XQ_FOUND_NAN


class Operand(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scale", "zero", "second")),
        *((f"outlier_{name}", c_void_p) for name in ("count", "excess", "channel")),
        *((name, c_void_p) for name in ("levels", "offset")),
        *((name, c_int32) for name in ("bits", "per_token", "group", "offline")),
        ("count_bytes", c_int32),
        ("zero_scales", c_float),
    ]


class Exact(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("key", "value", "cos", "sin", "column", "runs")),
        *((f"{name}_stride", c_int64) for name in ("batch", "token", "head")),
        *((name, c_int32) for name in ("dtype", "count", "start", "causal", "capacity", "pairs")),
    ]


class Attend(Structure):
    __slots__ = ()
    _fields_ = [
        ("key", Operand),
        ("value", Operand),
        *((name, c_void_p) for name in ("table", "lengths", "limits")),
        ("table_stride", c_int64),
        *((name, c_int32) for name in ("batch", "block")),
        *((name, c_int32) for name in ("kv_heads", "head_size", "group_heads", "queries")),
        *((name, c_void_p) for name in ("rope_table", "start_cos", "start_sin")),
        ("start_batch", c_int64),
        *((name, c_void_p) for name in ("query", "turned_query", "value_turn")),
        ("value_turn_head", c_int64),
        *((name, c_void_p) for name in ("out", "query_batches", "sink_logits")),
        *((f"query_{name}", c_int64) for name in ("batch", "head", "token")),
        *((f"out_{name}", c_int64) for name in ("batch", "token", "head")),
        *((name, c_int32) for name in ("dtype", "mask_dtype")),
        ("mask", c_void_p),
        *((f"mask_{name}", c_int64) for name in ("batch", "query", "token")),
        ("scaling", c_float),
        ("softcap", c_float),
        ("exact", Exact * 3),
        *((name, c_int32) for name in ("exact_count", "threads", "append", "unused")),
    ]


class Weigh(Structure):
    __slots__ = ()
    _fields_ = [
        ("attend", Attend),
        *((name, c_void_p) for name in ("scores", "value_bias")),
        *((name, c_int32) for name in ("columns", "unused")),
    ]


class AffineBlocks(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("rows", "excluded", "codes", "scale", "zero")),
        *((name, c_int64) for name in ("block_stride", "token_stride")),
        *((name, c_int32) for name in ("blocks", "tokens", "channels", "dtype")),
        *((name, c_int32) for name in ("bits", "per_token", "group")),
        *((name, c_int32) for name in ("head", "channel_lanes", "threads")),
        *((name, c_float) for name in ("zero_shift", "scale_factor")),
    ]


class CodebookBlocks(Structure):
    __slots__ = ()
    _fields_ = [
        ("blocks", AffineBlocks),
        *((name, c_void_p) for name in ("levels", "edges", "offline_scale", "offline_zero")),
        *((name, c_void_p) for name in ("lowest", "highest")),
        *((name, c_int32) for name in ("outliers", "last_outliers")),
        *((f"outlier_{name}", c_void_p) for name in ("count", "excess", "channel")),
        *((name, c_int32) for name in ("count_bytes", "unused")),
    ]


class RankedBlocks(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("rows", "excluded", "scale", "gain", "codes", "usual")),
        *((name, c_void_p) for name in ("sizes", "levels", "edges", "whole_levels")),
        *((name, c_void_p) for name in ("units", "ends", "borders", "costs", "gain_costs", "cost_borders")),
        *((name, c_int64) for name in ("block_stride", "token_stride", "code_bytes")),
        ("counts", c_int32 * 11),
        *(
            (name, c_int32)
            for name in ("blocks", "tokens", "channels", "dtype", "threads", "rests", "unused")
        ),
    ]


class Turning(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "start_cos", "start_sin")),
        *((name, c_void_p) for name in ("wave", "wave_cos", "wave_sin")),
        *((name, c_int64) for name in ("rope_batch", "rope_channel", "start_batch")),
        *((name, c_int32) for name in ("rotary_pairs", "built", "waves", "unused")),
    ]


class RebuildScores(Structure):
    __slots__ = ()
    _fields_ = [
        ("key", Operand),
        *((name, c_void_p) for name in ("table", "limits", "weights", "weight_scale")),
        *((name, c_void_p) for name in ("channel_scale", "weight_sums", "bias")),
        ("turning", Turning),
        *((f"slow_{name}", c_void_p) for name in ("weights", "scale", "bias")),
        *((name, c_void_p) for name in ("query", "scores")),
        ("table_stride", c_int64),
        *((name, c_int32) for name in ("batch", "columns", "block", "channels")),
        *((name, c_int32) for name in ("kv_heads", "head_size", "rows", "threads")),
    ]


class RebuildSum(Structure):
    __slots__ = ()
    _fields_ = [
        ("value", Operand),
        *((name, c_void_p) for name in ("table", "limits", "weights", "out")),
        ("table_stride", c_int64),
        *((name, c_int32) for name in ("batch", "columns", "block", "channels", "rows", "threads")),
    ]


class RankedOperand(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scale", "gain")),
        *((name, c_void_p) for name in ("usual", "sizes", "levels", "highest_level")),
        ("counts", c_int32 * 11),
        *((name, c_int32) for name in ("block", "channels", "unused")),
    ]


class RankedAttend(Structure):
    __slots__ = ()
    _fields_ = [
        ("attend", Attend),
        ("states", RankedOperand),
        ("more", RankedOperand),
        ("turning", Turning),
        *((name, c_void_p) for name in ("weights", "weight_scale", "mean")),
        *((f"slow_{name}", c_void_p) for name in ("weights", "bytes", "units", "norm", "mean")),
        *((name, c_void_p) for name in ("value_weight", "value_mean")),
        *((name, c_int32) for name in ("value_dtype", "unused")),
    ]


class Chunk(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("key", "value")),
        *((name, c_int64) for name in ("key_token", "key_head", "value_token", "value_head")),
        *((name, c_int32) for name in ("tokens", "queries", "first", "unused")),
    ]


class Prefill(Structure):
    __slots__ = ()
    _fields_ = [
        *((name, c_void_p) for name in ("chunks", "query", "out", "sink_logits")),
        *((name, c_int64) for name in ("query_token", "query_head", "out_token", "out_head")),
        *((name, c_float) for name in ("scaling", "softcap")),
        *((name, c_int32) for name in ("count", "kv_heads", "group_heads", "head_size")),
        *((name, c_int32) for name in ("dtype", "threads")),
    ]


LINEAR_PARTS = 4
"""As ``XQ_LINEAR_PARTS``."""


class LinearPart(Structure):
    __slots__ = ()
    _fields_ = [("packed", c_void_p), ("bias", c_void_p), ("outputs", c_int64)]


class Linear(Structure):
    __slots__ = ()
    _fields_ = [
        ("x", c_void_p),
        *((name, c_int32) for name in ("rows", "channels", "bits", "dtype", "threads", "count")),
        ("out", c_void_p),
        ("parts", LinearPart * LINEAR_PARTS),
    ]


CALLS = {
    "attend": Attend,
    "affine_encode": AffineBlocks,
    "affine_decode": AffineBlocks,
    "codebook_encode": CodebookBlocks,
    "ranked_encode": RankedBlocks,
    "ranked_decode": RankedBlocks,
    "rebuild_scores": RebuildScores,
    "rebuild_sum": RebuildSum,
    "ranked_attend": RankedAttend,
    "weigh": Weigh,
    "prefill": Prefill,
    "linear": Linear,
}
"""The functions of an instruction set, and what each is called with."""


def library_file() -> Path | None:
    """Where the library is, or None where the package was installed without a compiler."""
    folders = sys.modules[__package__].__path__  # an editable install has two
    given = os.environ.get("XQUANT_NATIVE_LIBRARY")
    files = [Path(given)] if given else [Path(folder) / _FILE for folder in folders]
    return next(filter(Path.exists, files), None)


def library() -> ctypes.CDLL | None:
    """The library, or None where there is none."""
    return loaded()[0]


def absence() -> str:
    """Why there is no library; empty where there is one."""
    return loaded()[1]


@cache
def loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none."""
    file = library_file()
    if file is None:
        elsewhere = platform.system() != "Linux" or platform.machine() not in MACHINES
        return None, OTHER_MACHINE if elsewhere else NOT_BUILT
    try:
        # torch is imported: its OpenMP runtime is the one that this library finds.
        found = ctypes.CDLL(str(file))
    except OSError as error:
        return None, f"the native library cannot be loaded: {error}"
    wanted = {f"xq_{name}_size": ctypes.sizeof(size) for name, size in CALLS.items()}
    for name, number in {"xq_interface": INTERFACE, **wanted}.items():
        measure = getattr(found, name, None)
        if measure is None or measure() != number:
            raise ImportError(f"{file} is of another version of xquant: install again")
    for isa in (isa for isa in ISAS if hasattr(found, f"xq_read_{isa}")):
        for name, structure in CALLS.items():
            getattr(found, f"xq_{name}_{isa}").argtypes = [POINTER(structure)]
        getattr(found, f"xq_read_{isa}").argtypes = [c_void_p, c_int64, c_int32]
    found.xq_rope_table.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_void_p]
    found.xq_rope_table.restype = None
    return found, ""


@cache
def warn_of_absence() -> None:
    """Say, once in a process, that there is no library and what to do."""
    remedy = (
        "; to have it built, install GCC or Clang with OpenMP and then xquant again"
        if absence() == NOT_BUILT
        else ""
    )
    warnings.warn(
        f"xquant: attention runs in torch, which is slower on a CPU: {absence()}{remedy}",
        RuntimeWarning,
        stacklevel=2,
    )


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, best first."""
    native = library()
    supported = 0 if native is None else native.xq_isas()
    return tuple(isa for isa, bit in ISAS.items() if supported & bit)


def address(
    tensor: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], *shape: int, rows: bool = False
) -> int:
    """Where a tensor lies that a kernel goes through as one of this type, or of one of these, and of this
    shape. It has no gaps, or, of ``rows``, none in the last dimension.

    Raises:
        ValueError: it is not, or it is on another device.
    """
    known = tensor.dtype in dtype if isinstance(dtype, tuple) else tensor.dtype == dtype
    if not known or tensor.shape != shape:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"a kernel wants {dtype} {list(shape)}, not {found}")
    if not tensor.is_cpu or not (tensor.is_contiguous() or (rows and tensor.stride(-1) == 1)):
        raise ValueError(f"a kernel wants a tensor on the CPU without gaps, not on {tensor.device}")
    return tensor.data_ptr()


def function(name: str, isa: str) -> Callable[[Structure], None]:
    """``xq_<name>_<isa>``, to be called with its structure.

    It raises ValueError where it finds NaN, and MemoryError where there is not enough memory.
    """
    native = library()
    assert native is not None
    found = getattr(native, f"xq_{name}_{isa}")

    def call(given: Structure) -> None:
        failed = found(byref(given))
        if failed == _FOUND_NAN:
            raise ValueError("NaN cannot be quantized")
        if failed:
            raise MemoryError(f"the native library has not enough memory ({name})")

    return call


def rope_table(cos: Tensor, sin: Tensor) -> Tensor:
    """What ``xq_rope_table`` makes of cos and sin ``[n, D/2]`` (fp32): int16 ``[n * D * 2]``."""
    native = library()
    assert native is not None
    angles = [t.contiguous() for t in (cos, sin)]
    table = torch.empty(cos.numel() * 2, dtype=torch.int16, device="cpu")
    where = [address(t, torch.float32, *cos.shape) for t in angles]
    native.xq_rope_table(*where, *cos.shape, table.data_ptr())
    return table


def reader() -> Callable[[Tensor], int] | None:
    """A function that reads all of a tensor as fast as it can, to measure bandwidth; None without the
    library."""
    native = library()
    if native is None or not isas():
        return None
    read = getattr(native, f"xq_read_{isas()[0]}")

    def all_of(tensor: Tensor) -> int:
        found: int = read(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())
        return found

    return all_of

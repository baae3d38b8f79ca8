"""Compiles the Triton kernels for a Hopper GPU, which need not be there; fails where one does not compile."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xquant.kernels.triton.jit.accumulate import accumulate
from xquant.kernels.triton.jit.attend import attend
from xquant.kernels.triton.jit.attend_exact import exact
from xquant.kernels.triton.jit.combine import combine
from xquant.kernels.triton.jit.rebuild import rebuild
from xquant.kernels.triton.jit.seal import seal
from xquant.kernels.triton.jit.sum_states import sum_states

TYPES = {
    **dict.fromkeys(("query", "newest_key", "newest_value", "tail", "sinks", "mask"), "*bf16"),
    **dict.fromkeys(("out", "rows_in", "sums_in_out"), "*bf16"),
    **dict.fromkeys(("sums_out", "peaks_out", "sums", "peaks", "offset"), "*fp32"),
    **dict.fromkeys(("scores", "scores_out", "units", "bias", "gain"), "*fp32"),
    **{
        f"{of}_{what}": "*fp32"
        for of in ("start", "turn", "tail", "sink")
        for what in ("cos", "sin")
    },
    **dict.fromkeys(("key_levels", "value_levels", "scale", "zero", "weights"), "*fp16"),
    **dict.fromkeys(("begins", "lengths", "sink_at", "codes", "found_nan"), "*i32"),
    **{"blocks": "*i64", "hidden": "*i1"},
    **dict.fromkeys(("scaling", "softcap", "epsilon", "zero_shift", "scale_share"), "fp32"),
}


ROW_STRIDES = tuple(
    f"{of}_{step}"
    for of in ("query", "key", "value", "tail", "sink", "row", "sequence", "token")
    for step in ("batch", "head", "token", "step")
)


def side(name: str, *given: Any) -> dict[str, Any]:
    """As `KernelOperand.constants`."""
    names = ("BITS", "TABLE", "PER_TOKEN", "SPAN", "GROUP", "SPARSE")
    return {f"{name}_{n}": v for n, v in zip(names, given, strict=True)}


def decoding(head: int, block: int, **given: Any) -> dict[str, Any]:
    common = {"OFFSET": False, "MASK": 0, "SOFTCAP": False, "SINKS": 0, "ROWS": 8}
    return {"D": head, "DP": padded(head), "N": block, "NP": padded(block), **common, **given}


def padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


DECODING = [
    # kivi-4bit before RoPE, kivi-3bit after it with odd sizes, kvquant-3bit-1%
    decoding(
        128,
        128,
        TURN=True,
        MASK=2,
        SINKS=1,
        OFFSET=True,
        **side("KEY", 4, False, False, 1, 128, 0),
        **side("VALUE", 4, False, True, 2, 128, 0),
    ),
    decoding(
        96,
        96,
        TURN=False,
        MASK=1,
        SOFTCAP=True,
        **side("KEY", 3, False, False, 1, 96, 0),
        **side("VALUE", 3, False, True, 0, 144, 0),
    ),
    decoding(
        64,
        64,
        TURN=True,
        **dict.fromkeys(
            ("queries", "group_heads", "kv_heads", "mask_token"), 1
        ),  # ones are constants
        **side("KEY", 3, True, False, 1, 64, 2),
        **side("VALUE", 3, True, True, 2, 1024, 2),
    ),
]
SEALING = [
    {"PER_TOKEN": False, "GROUP": 64, "BY_TOKEN": True, "HIDDEN": True, "ETA": True},
    {"PER_TOKEN": True, "GROUP": 128, "BY_TOKEN": False, "HIDDEN": False, "ETA": False},
]


STATES = {
    "D": 128,
    "DP": 128,
    "HEADS": 2,
    "N": 128,
    "NP": 128,
    "ROWS": 8,
    "CHUNK": 64,
    "SINKS": 1,
    "BIAS": True,
    "NORM": True,
}
PACKED = {"CODED": True, "TILE": 1024, "BITS": 4, "PER_TOKEN": False, "SPAN": 1, "GROUP": 128}
REBUILDING = [
    # latents of xquant-4bit, X of xquant-3bit with odd sizes, sums of xquant-cl
    {**STATES, **PACKED, "CHUNKS": 16, "MASK": 0, "SOFTCAP": False},
    {
        **{**STATES, "D": 96, "N": 96, "HEADS": 1, "SINKS": 0, "MASK": 1, "SOFTCAP": True},
        **{**PACKED, "TILE": 96, "BITS": 3, "PER_TOKEN": True, "SPAN": 2, "GROUP": 96},
        "CHUNKS": 64,
    },
    {**STATES, **PACKED, "CODED": False, "CHUNKS": 64, "MASK": 2, "SOFTCAP": False},
]
SUMMING = [
    {"SOURCE": 1, "D": 128, "DP": 128, "BITS": 4, "SPAN": 2, "GROUP": 128},
    {"SOURCE": 2, "D": 96, "DP": 128, "BITS": 3, "SPAN": 2, "GROUP": 96},
    {"SOURCE": 0, "D": 128, "DP": 128, "BITS": 4, "SPAN": 0, "GROUP": 1},
]
CARRYING = {"N": 128, "NP": 128, "OUT": 128, "CHUNK": 64, "TILE": 128, "BITS": 2}
CARRYING |= {"PER_TOKEN": True, "SPAN": 2, "GROUP": 128, "CHUNKS": 16}


def build(kernel: Any, constants: dict[str, Any], warps: int = 8, **types: str) -> Any:
    """A kernel as Triton has compiled it; ``types``: of arguments that are not as in `TYPES`."""
    signature = {
        name: "constexpr" if name in constants else {**TYPES, **types}.get(name, "i32")
        for name in kernel.arg_names
    }
    # As at run time: what is allocated begins at a multiple of 16 bytes, and so do its rows.
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*"
        or (signature[name] == "i32" and name in ("C", "width", *ROW_STRIDES))
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
    assert built.asm["cubin"]
    return built


if __name__ == "__main__":
    for given in DECODING:
        build(attend, given)
    build(combine, {"D": 96, "DP": 128, "OPEN": False})
    build(combine, {"D": 1024, "DP": 256, "OPEN": True})
    build(exact, {"D": 96, "DP": 128, "ROWS": 8, "MASK": 2, "SOFTCAP": True})
    for given in REBUILDING:
        build(rebuild, given, weights="*fp16" if given["CODED"] else "*bf16")
    for given in SUMMING:
        build(sum_states, {"N": 128, "NP": 128, "ROWS": 32, **given})
    for below, weighted in ((True, True), (False, False)):
        build(accumulate, {**CARRYING, "BELOW": below, "WEIGHTED": weighted}, sinks="*bf16")
    for given in SEALING:
        build(seal, {"D": 128, "DP": 128, "N": 64, "NP": 64, "BITS": 4, **given}, rows="*bf16")

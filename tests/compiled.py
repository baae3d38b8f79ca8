"""Compiles the Triton kernels for a Hopper GPU, which need not be there; fails where one does not compile."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xquant.kernels.gpu.attend import attend
from xquant.kernels.gpu.join import join
from xquant.kernels.gpu.seal import seal

TYPES = {
    **dict.fromkeys(("query", "newest_key", "newest_value", "tail", "sinks", "mask"), "*bf16"),
    **dict.fromkeys(("rows", "out"), "*bf16"),
    **dict.fromkeys(("sums_out", "peaks_out", "sums", "peaks", "offset"), "*fp32"),
    **{
        f"{of}_{what}": "*fp32"
        for of in ("start", "turn", "tail", "sink")
        for what in ("cos", "sin")
    },
    **dict.fromkeys(("key_levels", "value_levels", "scale", "zero"), "*fp16"),
    **dict.fromkeys(("begins", "lengths", "sink_at", "codes", "found_nan"), "*i32"),
    **{"blocks": "*i64", "hidden": "*i1"},
    **dict.fromkeys(("scaling", "softcap", "zero_shift", "scale_share"), "fp32"),
}


def side(name: str, *given: Any) -> dict[str, Any]:
    """As `describe.Side.constants`."""
    names = ("BITS", "TABLE", "PER_TOKEN", "SPAN", "GROUP", "SPARSE")
    return {f"{name}_{n}": v for n, v in zip(names, given, strict=True)}


def decoding(head: int, block: int, **given: Any) -> dict[str, Any]:
    common = {"OFFSET": False, "MASK": 0, "SOFTCAP": False, "SINKS": 0, "ROWS": 16}
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


def build(kernel: Any, constants: dict[str, Any]) -> None:
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants)
    built = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8})
    assert built.asm["cubin"]


if __name__ == "__main__":
    for given in DECODING:
        build(attend, given)
    build(join, {"D": 96, "DP": 128})
    for given in SEALING:
        build(seal, {"D": 128, "DP": 128, "N": 64, "NP": 64, "BITS": 4, **given})

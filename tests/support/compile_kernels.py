"""Compiles the Triton kernels for a Hopper GPU, which need not be there; fails where one does not compile.
With the argument `others` those that an engine needs are compiled for the GPUs before and after it, and two
for one of AMD; with `ranked` those of ranked codes for all four, which takes minutes."""

import sys
from types import SimpleNamespace
from typing import Any

import triton
from triton._utils import find_paths_if
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from xquant.kernels.triton.arguments import (
    BlockRope,
    Blocks,
    Call,
    ExactRows,
    Heads,
    KeyWeights,
    Matrix,
    Memory,
    Pages,
    Rows,
    Runs,
    Shape,
    Tables,
)
from xquant.kernels.triton.jit.accumulate import accumulate
from xquant.kernels.triton.jit.append import append
from xquant.kernels.triton.jit.attend import attend
from xquant.kernels.triton.jit.attend_exact import attend_exact
from xquant.kernels.triton.jit.combine import combine
from xquant.kernels.triton.jit.ranked import decode, rank
from xquant.kernels.triton.jit.rebuild import rebuild
from xquant.kernels.triton.jit.seal import assign, seal
from xquant.kernels.triton.jit.sum_states import CHANNEL_LANES, PLAIN, TOKEN_LANES, sum_states
from xquant.kernels.triton.jit.unpack import CHANNEL, TILE, TOKEN
from xquant.kernels.triton.operand import Layout

HEADS = Heads("*bf16", "i32", "i32", "i32")
ROWS = Rows("*bf16", "i32", "i32")
TAIL = ExactRows("*bf16", "i32", "i32", "*fp32", "*fp32")
SINKS = TAIL._replace(columns="*i32")
RINGS = ExactRows("*bf16", "i32", "i32", capacity="i32")
ROPE = BlockRope("*fp32", "*fp32", "*fp32", "*fp32")
BLOCKS = Blocks("*i64", "*i32", "*i32")
SHAPE = Shape("i32", "i32", "i32")
CALL = Call(HEADS, HEADS, HEADS, "*bf16", "i32", SHAPE, "fp32", "fp32")
WEIGHTS = KeyWeights(Matrix("*fp16", "*fp32"), "*fp32", "*fp32", "fp32")
BF16 = WEIGHTS._replace(matrix=Matrix("*bf16", "*fp32"))
TYPES: dict[str, Any] = {
    **dict.fromkeys(("key", "value", "out"), HEADS),
    **{"rings": RINGS, "rows_in": ROWS, "sums": ROWS, "blocks": BLOCKS, "shape": SHAPE},
    **{"call": CALL, "memory": Memory(BLOCKS, TAIL, SINKS, ROPE)},
    **{"tables": Tables("*fp16", "*fp16", "*fp32"), "weights": WEIGHTS, "matrix": WEIGHTS.matrix},
    **dict.fromkeys(("sums_out", "maxima_out", "maxima", "sink_logits"), "*fp32"),
    **dict.fromkeys(("scores", "scores_out"), "*fp32"),
    **dict.fromkeys(("scale", "zero"), "*fp16"),
    **{"addresses": "*i64", "rows_out": "*bf16"},
    **dict.fromkeys(("sink_columns", "codes", "found_nan"), "*i32"),
    **dict.fromkeys(("size", "size_out", "levels", "sizes"), "*fp32"),
    **dict.fromkeys(("order", "order_out", "runs", "usual"), "*i32"),
    "hidden": "*i1",
    **dict.fromkeys(("zero_shift", "scale_share"), "fp32"),
}
"""Of arguments; the fields of groups, too. What is no string is a constant."""


def decoding(head: int, block: int, **given: Any) -> dict[str, Any]:
    common = {"PAGED": False, "OFFSET": False, "MASK": 0, "SOFTCAP": False, "SINKS": 0, "ROWS": 4}
    return {"D": head, "DP": padded(head), "N": block, "NP": padded(block), **common, **given}


def padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def layout(
    bits: int,
    span: Any,
    group: int,
    per_token: bool = False,
    codebook: bool = False,
    count_bytes: int = 0,
) -> Layout:
    return Layout(bits, codebook, per_token, span.value, group, count_bytes)


DECODING = [
    # kivi-4bit before RoPE, kivi-3bit after it with odd sizes, kvquant-3bit-1%
    decoding(
        128,
        128,
        ROTATE=True,
        MASK=2,
        SINKS=1,
        OFFSET=True,
        KEY=layout(4, CHANNEL, 128),
        VALUE=layout(4, TOKEN, 128, per_token=True),
    ),
    decoding(
        96,
        96,
        ROTATE=False,
        MASK=1,
        SOFTCAP=True,
        KEY=layout(3, CHANNEL, 96),
        VALUE=layout(3, TILE, 144, per_token=True),
    ),
    decoding(
        64,
        64,
        ROTATE=True,
        KEY=layout(3, CHANNEL, 64, codebook=True, count_bytes=2),
        VALUE=layout(3, TOKEN, 1024, per_token=True, codebook=True, count_bytes=2),
    ),
]
RUNS = Runs("*i32", "*i32", "*i32", "*i32")
COUNTS = dict.fromkeys(("columns", "limit", "tail_count", "sink_count"))
PAGED = Memory(Pages("*i64", "*i32", "i32"), RINGS, RINGS._replace(capacity=None), ROPE, RUNS)
"""What an engine's sequences have in memory."""
NO_SINKS = PAGED._replace(sinks=None, runs=RUNS._replace(sinks=None))
ONES = CALL._replace(shape=Shape(1, 1, 1), mask_token_stride=1)
"""Ones are constants."""
STEP = CALL._replace(mask=None, shape=Shape(1, "i32", "i32"))
"""One query of every head."""
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
PACKED = {"PACKED": True, "TILE": 1024, "LAYOUT": layout(4, CHANNEL, 128)}
REBUILDING = [
    # latents of xquant-4bit, X of xquant-3bit with odd sizes, sums of xquant-cl
    {**STATES, **PACKED, "CHUNKS": 16, "MASK": 0, "SOFTCAP": False},
    {
        **{**STATES, "D": 96, "N": 96, "HEADS": 1, "SINKS": 0, "MASK": 1, "SOFTCAP": True},
        **{"PACKED": True, "TILE": 96, "LAYOUT": layout(3, TOKEN, 96, per_token=True)},
        "CHUNKS": 64,
    },
    {
        **{**STATES, "PACKED": False, "TILE": None, "LAYOUT": None},
        **{"CHUNKS": 64, "MASK": 2, "SOFTCAP": False},
    },
]
SUMMING = [
    {
        **{"SOURCE": CHANNEL_LANES.value, "D": 128, "DP": 128},
        "LAYOUT": layout(4, TOKEN, 128, per_token=True),
    },
    {
        **{"SOURCE": TOKEN_LANES.value, "D": 96, "DP": 128},
        "LAYOUT": layout(3, TOKEN, 96, per_token=True),
    },
    {"SOURCE": PLAIN.value, "D": 128, "DP": 128, "LAYOUT": None},
]
BLOCK = {"N": 128, "NP": 128}
ACCUMULATING = {
    **{"N": 128, "NP": 128, "OUT": 128, "CHUNK": 64, "CHUNKS": 16, "TILE": 128},
    "LAYOUT": layout(2, TOKEN, 128, per_token=True),
}


def typed(kind: Any, path: tuple[int, ...], known: dict[tuple[int, ...], Any]) -> Any:
    """What Triton is told of an argument of a ``kind``; constants are added to ``known``."""
    if isinstance(kind, tuple):
        return type(kind)(*(typed(each, (*path, i), known) for i, each in enumerate(kind)))
    if isinstance(kind, str):
        return kind
    known[path] = kind
    return "constexpr"


MULTIPLES = ("batch_stride", "head_stride", "token_stride", "table_stride", "C", "width")
"""Numbers that are multiples of 16."""


def build(
    kernel: Any, constants: dict[str, Any], warps: int = 8, target: int | str = 90, **types: Any
) -> Any:
    """A kernel as Triton has compiled it; ``types``: of arguments that are not as in `TYPES`; ``target``: a
    compute capability of CUDA, or an architecture of AMD."""
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], known[i,] = "constexpr", constants[name]
        else:
            signature[name] = typed({**TYPES, **types}.get(name, "i32"), (i,), known)

    def aligned(path: tuple[int, ...], kind: str) -> bool:
        """As at run time: what is allocated begins at a multiple of 16 bytes, and so do its rows."""
        name = kernel.arg_names[path[0]]
        group = signature[name]
        for number in path[1:]:
            name, group = group._fields[number], group[number]
        return kind[0] == "*" or (kind == "i32" and name in MULTIPLES)

    paths = find_paths_if(list(signature.values()), aligned)
    attributes = {path: [["tt.divisibility", 16]] for path in paths}
    source = ASTSource(kernel, signature, known, attributes)
    amd = isinstance(target, str)
    device = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", target, 32)
    # The kernels ask for the target (`halves.named`), which without a GPU nobody knows.
    driver.set_active(SimpleNamespace(get_current_target=lambda: device))
    built = triton.compile(source, device, {"num_warps": warps})
    assert built.asm["hsaco" if amd else "cubin"]
    return built


def engines(target: int) -> None:
    """What an engine needs."""
    paged = {"PAGED": True, **COUNTS}
    build(attend, {**DECODING[0], "MASK": 0, **paged}, target=target, memory=PAGED)
    given = {**DECODING[2], "SOFTCAP": True, **paged}
    build(attend, given, target=target, memory=NO_SINKS, call=STEP)
    head = {"D": 128, "DP": 128}
    pages = {**head, "N": 128, "PARTIAL": False, "sink_logits": None}
    build(combine, pages, target=target, sums="*fp32", runs=RUNS)
    build(append, {"W": 1024, "WP": 1024, "D": 128}, target=target, runs=RUNS)
    for by_token in (False, True):
        given = {**head, "N": 64, "NP": 64, "BITS": 3, "BY_TOKEN": by_token, "PLAIN": True}
        build(assign, given, target=target, rows="*fp32", edges="*fp32", plain="*u8")


if __name__ == "__main__":
    if sys.argv[1:] == ["ranked"]:
        for target in (80, 90, 100, "gfx942"):
            build(rank, {"RANKED": 64}, target=target)
            build(decode, {"N": 128, "NP": 128}, target=target)
        sys.exit()
    others = sys.argv[1:] == ["others"]
    for target in (80, 100) if others else (90,):
        engines(target)
    if others:
        build(attend, DECODING[0], target="gfx942")
        build(rebuild, REBUILDING[0], target="gfx942")
        sys.exit()
    for given, call in zip(DECODING, (CALL, ONES, STEP), strict=True):
        build(attend, given, call=call)
    of_a_cache = {"runs": None, "N": None}
    build(combine, {"D": 96, "DP": 128, "PARTIAL": False, **of_a_cache}, sums="*fp32")
    alone = {**of_a_cache, "sink_logits": None}
    build(combine, {"D": 1024, "DP": 256, "PARTIAL": True, **alone}, sums="*fp32")
    exact = {"D": 96, "DP": 128, "ROWS": 8, "SOFTCAP": True}
    build(attend_exact, {**exact, "MASK": 2})
    build(attend_exact, {**exact, "MASK": 0}, call=STEP)
    for given in REBUILDING:
        call = CALL if given["MASK"] else STEP
        build(rebuild, given, weights=WEIGHTS if given["PACKED"] else BF16, call=call)
    for given in SUMMING:
        build(sum_states, {"N": 128, "NP": 128, "ROWS": 32, **given})
    for below, weighted in ((True, True), (False, False)):
        build(accumulate, {**ACCUMULATING, "BELOW": below, "WEIGHTED": weighted}, sinks="*bf16")
    for given in SEALING:
        build(seal, {"D": 128, "DP": 128, "N": 64, "NP": 64, "BITS": 4, **given}, rows="*bf16")

"""What Triton's kernels are compiled to for a Hopper GPU, which need not be there: registers, spills, shared
memory, and the instructions of their loops.

    python benchmarks/instructions.py --json benchmarks/results/triton-instructions.json

No time is measured. `of_fp16_*` estimates from below: the time in which a GPU starts so many instructions, to
the time in which it reads the same keys and values in fp16 (`Gpu`). Kernels also wait: for memory, for each
other's results, at barriers.

triton-instructions-before.json has the same of commit 52db536, whose src and tests were first in PYTHONPATH.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from math import comb
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import triton

from support.compile_kernels import (
    ACCUMULATING,
    BF16,
    COUNTS,
    NO_SINKS,
    REBUILDING,
    SUMMING,
    build,
    decoding,
    layout,
)
from xquant.cli.tables import print_table
from xquant.kernels.triton.jit.accumulate import accumulate
from xquant.kernels.triton.jit.attend import attend
from xquant.kernels.triton.jit.rebuild import rebuild
from xquant.kernels.triton.jit.sum_states import sum_states
from xquant.kernels.triton.jit.unpack import CHANNEL, TOKEN
from xquant.results import stamp, write_json

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
JUMP = re.compile(r"BRA\S*\s+.*?0x([0-9a-f]+)")
SPILL = re.compile(r"\b(LDL|STL)\b")

SMS, CLOCK, ISSUED = 132, 1.755e9, 4
"""Of an H100 and an H200: multiprocessors, hertz, and the instructions that one starts in a cycle at most."""
REGISTERS, SHARED, WARPS = 1 << 16, 228 << 10, 64
"""Of a multiprocessor: registers, bytes of shared memory, warps."""


class Gpu(NamedTuple):
    name: str
    fp16: float
    """Bytes a second at which attention reads fp16 keys and values."""


GPUS = (
    # On an H200 the best of SDPA reads 4.47 TB/s at 32K tokens and batch 8 (results/gpu/attention.json).
    # The H100's is assumed: it has 3.35 of the 4.8 TB/s that an H200 has.
    Gpu("h100", 4.48e12 * 3.35 / 4.8),
    Gpu("h200", 4.48e12),
)

HEAD, TOKENS, KV_HEADS, WIDTH = 128, 128, 8, 4096  # those of Llama-3.1-8B, in blocks of 128
BLOCK = 2 * HEAD * TOKENS
"""Elements: keys and values of a head in a block."""


class Kernel(NamedTuple):
    name: str
    function: Any
    constants: dict[str, Any]
    warps: int
    elements: int
    """Keys and values of the cache that one round of the loop stands for."""
    types: Mapping[str, Any] = MappingProxyType({})


def attending(bits: int, rotate: bool, codebook: bool = False, outliers: bool = False) -> Any:
    """A block of a head, for up to 4 query heads."""
    found = {"codebook": codebook, "count_bytes": 2 * outliers}
    keys = layout(bits, CHANNEL, TOKENS, **found)
    group = KV_HEADS * HEAD if codebook else HEAD
    values = layout(bits, TOKEN, group, per_token=True, **found)
    return decoding(HEAD, TOKENS, ROTATE=rotate, KEY=keys, VALUE=values)


def kvquant(bits: int) -> Any:
    return attending(bits, True, codebook=True, outliers=True)


IN_PAGES = {"PAGED": True, **COUNTS}
PAGES = {"memory": NO_SINKS}
LATENTS = {**REBUILDING[0], "BIAS": False, "NORM": False, "SINKS": 0}
SUMS = {**REBUILDING[2], "BIAS": False, "NORM": False, "SINKS": 0, "MASK": 0}
STATES = {"N": TOKENS, "NP": TOKENS, "ROWS": 32, **SUMMING[0]}
DELTAS = {**ACCUMULATING, "BELOW": True, "WEIGHTED": True}
WHOLE = BLOCK * KV_HEADS
KERNELS = (
    Kernel("attend, kivi-4bit", attend, attending(4, True), 8, BLOCK),
    Kernel("attend, kivi-4bit:rope=post", attend, attending(4, False), 4, BLOCK),
    Kernel("attend, kivi-2bit", attend, attending(2, True), 8, BLOCK),
    Kernel("attend, kivi-2bit:rope=post", attend, attending(2, False), 4, BLOCK),
    Kernel("attend, kivi-4bit, pages", attend, {**attending(4, True), **IN_PAGES}, 8, BLOCK, PAGES),
    Kernel("attend, kvquant-4bit", attend, attending(4, True, codebook=True), 8, BLOCK),
    Kernel("attend, kvquant-4bit-1%", attend, kvquant(4), 8, BLOCK),
    Kernel("attend, kvquant-3bit-1%", attend, kvquant(3), 8, BLOCK),
    Kernel("attend, kvquant-2bit-1%", attend, kvquant(2), 8, BLOCK),
    Kernel("attend, kvquant-4bit-1%, pages", attend, {**kvquant(4), **IN_PAGES}, 8, BLOCK, PAGES),
    # A round has 64 channels of 1024, or of 4096, and 2 heads.
    Kernel("rebuild, xquant-4bit", rebuild, LATENTS, 8, WHOLE // (16 * KV_HEADS // 2)),
    Kernel(
        *("rebuild, xquant-cl", rebuild, SUMS, 8, WHOLE // (64 * KV_HEADS // 2)),
        {"weights": BF16},
    ),
    # A round has 128 channels of 1024.
    Kernel("sum_states, xquant-4bit", sum_states, STATES, 8, WHOLE // 8),
    # A round has 64 channels of 1024, for 128 of 4096.
    Kernel(
        *("accumulate, xquant-cl-2bit", accumulate, DELTAS, 8, WHOLE // (16 * WIDTH // 128)),
        {"sinks": "*bf16"},
    ),
)


# -- loops -----------------------------------------------------------------------------------------


def expected(rounds: Callable[[int], int], tries: int, sets: int, share: float = 0.01) -> float:
    """How many ``rounds`` a loop is expected to have by the most outliers in any of ``sets`` of ``tries``
    elements, of which a ``share`` are outliers, anywhere."""
    one = [comb(tries, k) * share**k * (1 - share) ** (tries - k) for k in range(min(tries, 100))]
    below, total = 0.0, 0.0
    for k, chance in enumerate(one):
        total += rounds(k) * ((below + chance) ** sets - below**sets)
        below += chance
    return total


def rounds_of(inner: int) -> list[float]:
    """How often each of the ``inner`` loops goes round, in their order, in one round of the loop over
    blocks."""
    of_token, of_head = KV_HEADS * HEAD, HEAD
    if inner == 4:  # attend: the steps of the search, the search, outliers of keys, those of values
        return [
            expected(lambda k: max(k.bit_length() - 1, 0), of_token, 2 * TOKENS),
            expected(int.bit_length, of_token, 2 * TOKENS),
            expected(lambda k: -(-k // 2), of_head, TOKENS),
            expected(lambda k: -(-k // 32), 16 * of_head, TOKENS // 16),
        ]
    if inner == 6:  # before: of keys, then values: a scan by four, and what is left; a tile an outlier
        return 2 * [
            expected(lambda k: k // 4, of_token, TOKENS),
            expected(lambda k: k % 4, of_token, TOKENS),
            expected(lambda k: k, of_head, TOKENS),
        ]
    assert inner == 0, inner
    return []


class Loop(NamedTuple):
    start: int
    end: int

    def within(self, other: "Loop") -> bool:
        return self != other and other.start <= self.start and self.end <= other.end


def loops_of(code: list[tuple[int, str]]) -> list[Loop]:
    """The loops, outer before inner. Code behind a loop that jumps back into it makes none: it stands there
    because it seldom runs."""
    found = {Loop(int(m[1], 16), at) for at, text in code if (m := JUMP.search(text))}
    loops = sorted(loop for loop in found if loop.start < loop.end)
    return [a for a in loops if not any(b.start < a.start < b.end < a.end for b in loops)]


def counted(cubin: bytes, kernel: Kernel) -> dict[str, Any]:
    """Of compiled code: what a program takes, and the instructions of its last loop that is in no other. That
    goes over blocks, or over channels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used, listing = (
            subprocess.run([TOOL, what, file.name], capture_output=True, text=True, check=True)
            for what in ("-res-usage", "-sass")
        )
    code = [(int(m[1], 16), m[2]) for m in map(INSTRUCTION.match, listing.stdout.splitlines()) if m]
    loops = loops_of(code)
    last = [a for a in loops if not any(a.within(b) for b in loops)][-1]
    inner = [loop for loop in loops if loop.within(last)]

    def own(loop: Loop, nested: list[Loop]) -> int:
        return sum(
            loop.start <= at <= loop.end and not any(b.start <= at <= b.end for b in nested) for at, _ in code
        )

    counts = [own(last, inner), *(own(loop, []) for loop in inner)]
    rounds = [1.0, *rounds_of(len(inner))]
    spills = sum(last.start <= at <= last.end and bool(SPILL.search(text)) for at, text in code)
    instructions = sum(c * r for c, r in zip(counts, rounds, strict=True)) * kernel.warps
    registers, stack = (re.search(rf"{n}:(\d+)", used.stdout) for n in ("REG", "STACK"))
    assert registers is not None and stack is not None
    return {
        "warps": kernel.warps,
        "registers": int(registers[1]),
        "spilled_bytes": int(stack[1]),
        "spills_in_loop": spills,
        "loops": [[c, round(r, 2)] for c, r in zip(counts, rounds, strict=True)],
        "instructions_an_element": round(32 * instructions / kernel.elements, 2),
    }


def programs(registers: int, shared: int, warps: int) -> int:
    """How many of a kernel's programs a multiprocessor runs at once."""
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // 4 // of_warp * 4 // warps
    return min(by_registers, SHARED // (shared + 1024), WARPS // warps)


def row_of(kernel: Kernel) -> dict[str, Any]:
    built = build(kernel.function, kernel.constants, kernel.warps, **kernel.types)
    found = counted(built.asm["cubin"], kernel)
    shared = built.metadata.shared
    second = SMS * CLOCK * ISSUED * 32 / found["instructions_an_element"]  # elements
    return {
        "kernel": kernel.name,
        **found,
        "shared_bytes": shared,
        "programs_an_sm": programs(found["registers"], shared, kernel.warps),
        **{f"of_fp16_{gpu.name}": round(gpu.fp16 / 2 / second, 2) for gpu in GPUS},
        "target": "sm_90",
        "triton": triton.__version__,
    }


@click.command()
@click.option("--json", "json_file", help="Where to write the rows.")
def main(json_file: str | None) -> None:
    """Compile the kernels and count."""
    rows = [row_of(kernel) for kernel in KERNELS]
    if json_file:
        write_json(json_file, stamp(rows))
    columns = dict.fromkeys(rows[0], "right")
    print_table({**columns, "kernel": "left"}, [tuple(map(str, row.values())) for row in rows])


if __name__ == "__main__":
    main()

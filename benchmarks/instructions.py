"""What Triton's kernels are compiled to for a Hopper GPU, which need not be there: registers, and the
instructions of their loops.

    python benchmarks/instructions.py --json benchmarks/results/triton-instructions.json

No time is measured. A multiprocessor of that GPU starts at most four instructions of a warp in a cycle, so
what is counted bounds how many blocks it can read; how close it comes is for a GPU to say.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import triton

from compiled import ACCUMULATING, NO_SINKS, PAGED, REBUILDING, SUMMING, build, decoding, layout
from xquant.cli.common import print_table
from xquant.kernels.triton.arguments import Matrix
from xquant.kernels.triton.jit.accumulate import accumulate
from xquant.kernels.triton.jit.attend import attend
from xquant.kernels.triton.jit.rebuild import rebuild
from xquant.kernels.triton.jit.sum_states import sum_states
from xquant.kernels.triton.jit.unpack import CHANNEL, TOKEN
from xquant.results.rows import stamp, write_json

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
JUMP = re.compile(r"BRA\S*\s+.*?0x([0-9a-f]+)")


def kivi(bits: int, rotate: bool) -> dict[str, Any]:
    """A block of 128 tokens of a head of 128 channels, for up to 8 query heads."""
    keys, values = layout(bits, CHANNEL, 128), layout(bits, TOKEN, 128, per_token=True)
    return decoding(128, 128, ROTATE=rotate, KEY=keys, VALUE=values)


IN_PAGES = {"PAGED": True, **NO_SINKS}
BLOCK = {"N": 128, "NP": 128}
LATENTS = {**REBUILDING[0], "BIAS": False, "NORM": False, "SINKS": 0}
SUMS = {**REBUILDING[2], "BIAS": False, "NORM": False, "SINKS": 0, "MASK": 0}
KERNELS: dict[str, tuple[Any, dict[str, Any], int, dict[str, Any]]] = {
    "attend, kivi-4bit": (attend, kivi(4, True), 8, {}),
    "attend, kivi-4bit:rope=post": (attend, kivi(4, False), 4, {}),
    "attend, kivi-4bit, pages": (attend, {**kivi(4, True), **IN_PAGES}, 8, PAGED),
    "attend, kivi-4bit:rope=post, pages": (attend, {**kivi(4, False), **IN_PAGES}, 4, PAGED),
    "attend, kivi-2bit": (attend, kivi(2, True), 8, {}),
    "attend, kivi-2bit:rope=post": (attend, kivi(2, False), 4, {}),
    "rebuild, xquant-4bit": (rebuild, LATENTS, 8, {}),
    "rebuild, xquant-cl": (rebuild, SUMS, 8, {"matrix": Matrix("*bf16", "*fp32")}),
    "sum_states, xquant-4bit": (
        sum_states,
        {**BLOCK, "ROWS": 32, **SUMMING[0]},
        8,
        {},
    ),
    "accumulate, xquant-cl-2bit": (
        accumulate,
        {**ACCUMULATING, "BELOW": True, "WEIGHTED": True},
        8,
        {"sinks": "*bf16"},
    ),
}
"""The kernel, what it is compiled for, warps, types of arguments; Llama-3.1-8B's sizes."""


def counted(cubin: bytes, warps: int) -> dict[str, Any]:
    """Of compiled code: instructions of each of its loops, all warps together, in the order of the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used, listing = (
            subprocess.run([TOOL, what, file.name], capture_output=True, text=True, check=True)
            for what in ("-res-usage", "-sass")
        )
    code = [(int(m[1], 16), m[2]) for m in map(INSTRUCTION.match, listing.stdout.splitlines()) if m]
    loops = [(int(m[1], 16), at) for at, text in code if (m := JUMP.search(text))]
    bodies = [sum(start <= at <= end for at, _ in code) for start, end in loops if start < end]
    registers, stack = (re.search(rf"{n}:(\d+)", used.stdout) for n in ("REG", "STACK"))
    assert registers is not None and stack is not None
    return {
        "warps": warps,
        "registers": int(registers[1]),
        "spilled_bytes": int(stack[1]),
        "instructions_of_loops": [body * warps for body in bodies],
    }


@click.command()
@click.option("--json", "json_file", help="Where to write the rows.")
def main(json_file: str | None) -> None:
    """Compile the kernels and count."""
    rows = []
    for name, (kernel, constants, warps, types) in KERNELS.items():
        built = build(kernel, constants, warps, **types)
        rows.append({"kernel": name, "target": "sm_90", **counted(built.asm["cubin"], warps)})
    if json_file:
        write_json(json_file, stamp([{**row, "triton": triton.__version__} for row in rows]))
    columns = dict.fromkeys(rows[0], "right")
    print_table({**columns, "kernel": "left"}, [tuple(map(str, row.values())) for row in rows])


if __name__ == "__main__":
    main()

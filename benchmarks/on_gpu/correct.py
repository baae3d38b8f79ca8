"""Whether attention is right at the shapes that are timed: its error against double precision over what the
cache holds."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from support.attention_cases import Case, error, filled
from xquant.kernels.trial import tolerance

from .machine import Machine, Row
from .plan import KVQUANT

SPECS = (
    "kivi-4bit",
    "kivi-4bit:rope=post",
    "kivi-2bit",
    "kivi-2bit:rope=post",
    "int4",
    KVQUANT,
    "xquant-4bit",
)
LONG = SPECS[:4]


def correct(machine: Machine) -> Iterator[list[Row]]:
    """A row for every case and kernel: that of ``auto``, and Triton's where it took another."""
    for case in cases(machine):
        first = _row(machine, case)
        yield [first]
        if not str(first["kernel"]).startswith("triton"):
            yield [_row(machine, replace(case, path="triton"))]


def cases(machine: Machine) -> Iterator[Case]:
    """Tails of no tokens, a half block, and all but one of a block; padded batches and masks of both kinds; a
    long context."""
    for number, (size, kv_heads, group, block) in enumerate(machine.sizes.heads):
        shape = Case(
            "",
            head_size=size,
            kv_heads=kv_heads,
            group_heads=group,
            layers=1,
            path="auto",
            dtype=machine.dtype,
        )
        for spec in SPECS:
            spec = machine.method(spec).spec
            for tail, batch, mask in (
                (0, 1, "none"),
                (block // 2, 2, "bool"),
                (block - 1, 3, "float"),
            ):
                tokens = machine.sizes.few * block + tail
                yield replace(shape, spec=spec, tokens=tokens, batch=batch, mask=mask)
        if number == 0:
            for spec in LONG:
                yield replace(shape, spec=machine.method(spec).spec, tokens=machine.sizes.long)


def _row(machine: Machine, case: Case) -> Row:
    start, least = time.monotonic(), tolerance(case.dtype)
    row: Row = {
        "method": case.spec,
        "head": case.head_size,
        "kv_heads": case.kv_heads,
        "query_heads": case.kv_heads * case.group_heads,
        "context": case.tokens,
        "batch": case.batch,
        "mask": case.mask,
        "dtype": str(case.dtype).removeprefix("torch."),
        **{"kernel": case.path, "error": None, "at_most": least, "right": False, "failed": None},
    }
    try:
        with torch.inference_mode():
            cache = filled(case)
            row["kernel"] = cache.report().kernel
            row["error"] = error(case, cache)
        row["right"] = math.isfinite(row["error"]) and row["error"] <= least
    except Exception as failed:  # whatever a compiler or a driver raises
        row["failed"] = f"{type(failed).__name__}: {failed}"[:300]
    return {**row, "seconds": time.monotonic() - start}

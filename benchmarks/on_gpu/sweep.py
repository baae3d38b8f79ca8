"""How many warps, pipeline stages, registers and splits Triton's `attend` is fastest with."""

import statistics
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, NamedTuple

import torch

from xquant.kernels.triton.device import Slots
from xquant_lab.bench.clocks import Clock, reason
from xquant_lab.bench.contenders import Compressed

from .machine import Machine, Row

METHODS = ("kivi-4bit", "kivi-4bit:rope=post", "kivi-2bit", "kivi-2bit:rope=post")
OPTIONS: dict[str, tuple[int | None, ...]] = {
    "num_warps": (4, 8),
    "num_stages": (3, 5),
    "maxnreg": (None, 128),
}
"""Of the compiler."""
WAVES = (1, 2, 4)
"""Blocks are split as if so many times the programs ran at once."""
OWN: dict[str, Any] = {}
"""What the kernel is launched with as it is."""


class Waves(NamedTuple):
    """In place of `Slots`."""

    slots: Slots
    waves: int

    def of(self, *args: Any, **constants: Any) -> int:
        return self.waves * self.slots.of(*args, **constants)


@torch.inference_mode()
def sweep(machine: Machine) -> Iterator[list[Row]]:
    """A row for every way to launch; the first of a method is the kernel's own, and the fastest has won."""
    context, batch = machine.sizes.sweep
    models = machine.shaped(machine.sizes.layers).attached(machine.dtype)
    for spec in METHODS:
        method = machine.method(spec)
        contender = Compressed(models, method, context, batch, None, "triton")
        codec = contender.cache.compressed[0].codec
        subject = {"method": method.spec, "context": context, "batch": batch}
        subject |= {"rotates": not codec.rotated, "head": codec.view.head_size}
        subject |= {"block": method.group, "kernel": "attend"}
        rows = []
        for options in [OWN, *islice(_ways(), machine.sizes.ways)]:
            found = _timed(machine, contender, options)
            rows.append({**subject, "options": options, **found, "won": False})
        if timed := [row for row in rows if row["ms_per_layer"]]:
            min(timed, key=lambda row: row["ms_per_layer"])["won"] = True
        yield rows
        machine.fresh()


def _ways() -> Iterator[dict[str, Any]]:
    for waves, *values in product(WAVES, *OPTIONS.values()):
        yield {"waves": waves, **dict(zip(OPTIONS, values, strict=True))}


def _timed(machine: Machine, contender: Compressed, options: Mapping[str, Any]) -> Row:
    row = Row(ms_per_layer=None, failed=None)
    layers = list(contender.cache.stack._attentions.values())
    own = [(layer._packed.constants, layer._packed.slots) for layer in layers]
    given = {k: v for k, v in options.items() if k != "waves" and v is not None}
    try:
        for layer, (constants, slots) in zip(layers, own, strict=True):
            layer._packed.constants = {**constants, **given}
            layer._packed.slots = Waves(slots, options.get("waves", 1))
        row["ms_per_layer"] = _median(machine.clock(contender.attend), machine) / len(layers) * 1e3
    except Exception as error:  # what a compiler refuses, as too many registers
        row["failed"] = reason(error)
    finally:
        for layer, (constants, slots) in zip(layers, own, strict=True):
            layer._packed.constants, layer._packed.slots = constants, slots
    return row


def _median(clock: Clock, machine: Machine) -> float:
    clock.settle()
    return statistics.median(clock() for _ in range(machine.sizes.rounds))

"""Attention of a decoding step, sealing and the largest batch, as `xquant bench` measures them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from xquant.progress import silent
from xquant_lab.bench import capacity, ceilings
from xquant_lab.bench.largest import largest_batches
from xquant_lab.bench.run import bench
from xquant_lab.bench.trials import Settings

from .machine import Machine, Row
from .plan import KVQUANT, Size

METHODS = ("kivi-4bit", "kivi-2bit", "kivi-4bit:rope=post", "kivi-2bit:rope=post", "int4")
OTHERS = ("xquant-4bit", KVQUANT)
FEW = 4
"""Layers of methods that decompose the weights of each."""


def limits(machine: Machine) -> Iterator[list[Row]]:
    """What the device can do."""
    row: Row = {"device": str(machine.device)}
    yield [ceilings.as_row(machine.device) if machine.on_gpu else row]


def attention(machine: Machine) -> Iterator[list[Row]]:
    """One full cache a size with every kernel there is, beside all methods; and `kivi-4bit` again with
    Triton's kernel, where ``auto`` takes another."""
    for size in machine.sizes.attention:
        rows = _attention(machine, METHODS, size, machine.sizes.layers)
        yield rows
        if not str(rows[1]["kernel"]).startswith("triton"):
            again = _attention(machine, METHODS[:1], size, machine.sizes.layers, "triton")
            yield again[1:]


def others(machine: Machine) -> Iterator[list[Row]]:
    """Methods that rebuild keys and values, or have outliers."""
    layers = min(FEW, machine.sizes.layers)
    for size in machine.sizes.others:
        yield _attention(machine, OTHERS, size, layers)


def sealing(machine: Machine) -> Iterator[list[Row]]:
    """Appending tokens, and packing blocks of them."""
    for size in machine.sizes.sealing:
        yield _attention(machine, METHODS[:2], size, machine.sizes.layers, sealing=True)


def _attention(
    machine: Machine,
    specs: Sequence[str],
    size: Size,
    layers: int,
    kernel: str = "auto",
    sealing: bool = False,
) -> list[Row]:
    settings = Settings(
        *size, rounds=machine.sizes.rounds, kernel=kernel, dtypes=(machine.dtype,), whole=False
    )
    settings = replace(settings, sealing=sealing, warm_up=min(3, settings.rounds))
    methods, models = [machine.method(spec) for spec in specs], machine.shaped(layers)
    return bench(models, methods, settings, silent, limits=machine.limits)


def largest(machine: Machine) -> Iterator[list[Row]]:
    """The largest batch that fits beside the weights of the whole model."""
    models, methods = machine.whole, [machine.method(spec) for spec in METHODS[:2]]
    kernel = machine.sizes.largest_kernel
    for context in machine.sizes.largest:
        room = machine.sizes.memory or capacity.free_bytes(machine.device)
        yield list(largest_batches(models, methods, context, machine.dtype, kernel, room, silent))

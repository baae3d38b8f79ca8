"""Which stages there are, how long each may take, and at which sizes. Imports nothing that takes time."""

from dataclasses import dataclass

KVQUANT = "kvquant-4bit-1%:datatype=nf,scales=online"
Size = tuple[int, int]
"""Tokens of a sequence, sequences."""


@dataclass(frozen=True)
class Stage:
    """What leaves ``NAME.json``."""

    name: str
    seconds: float
    """That it may take."""
    apart: bool = False
    """Whether it may crash, and is a process of its own; the others share one."""


STAGES = (
    Stage("ceilings", 22),
    Stage("correct", 35),
    Stage("attention", 85),
    Stage("steps", 95),
    Stage("sweep", 15),
    Stage("others", 20),
    Stage("sealing", 10),
    Stage("largest", 90),
    Stage("tests", 110, apart=True),
    Stage("racecheck", 35, apart=True),
)
"""All of them, the most wanted first."""


@dataclass(frozen=True)
class Sizes:
    """The models and caches of all stages."""

    shape: str
    layers: int
    """Of the shape, whose attention is timed."""
    rounds: int
    blocks: str
    """An option of every method."""
    heads: tuple[tuple[int, int, int, int], ...]
    """Whose attention must be right: the size of a head, key/value heads, query heads of each, a block."""
    few: int
    """Blocks before tails of all lengths that must be right."""
    long: int
    """Tokens of the longest context that must be right."""
    attention: tuple[Size, ...]
    others: tuple[Size, ...]
    steps: Size
    sweep: Size
    ways: int
    """To launch a kernel that are tried, at most."""
    sealing: tuple[Size, ...]
    largest: tuple[int, ...]
    memory: float | None = None
    """Bytes in which the largest batch must fit; what is free where there is none."""
    largest_kernel: str = "auto"


# Contexts are no whole blocks: 64 tokens are in the tail.
WHOLE = Sizes(
    shape="llama-3.1-8b",
    layers=8,
    rounds=7,
    blocks="",
    heads=((128, 8, 4, 128), (64, 2, 4, 128)),
    few=4,
    long=32768 + 64,
    attention=((32832, 8), (32832, 1), (32832, 16), (131136, 1)),
    others=((32832, 8), (32832, 1)),
    steps=(32832, 8),
    sweep=(32832, 8),
    ways=24,
    sealing=((8256, 8),),
    largest=(8192, 32768),
)
QUICK = Sizes(
    shape="tiny",
    layers=1,
    rounds=1,
    blocks="group=32",
    heads=((32, 2, 2, 32),),
    few=1,
    long=32 * 3 + 16,
    attention=((80, 1),),
    others=((80, 1),),
    steps=(80, 1),
    sweep=(80, 1),
    ways=2,
    sealing=((40, 1),),
    largest=(64,),
    memory=2e6,
    largest_kernel="reference",  # so many steps take the interpreter minutes
)
"""A rehearsal in Triton's interpreter: what it measures means nothing."""


def sized(spec: str, options: str) -> str:
    """A spec with further options."""
    return f"{spec}{',' if ':' in spec else ':'}{options}" if options else spec

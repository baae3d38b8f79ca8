"""What caches of fewer bits than `kivi-4bit` lose, and how fast they are read."""

from .common import RESULTS, Row, by_method, code, markdown, table

TEXTS = {"WikiText-2": "wikitext2", "C4": "c4", "Python source": "code"}
QUALITY = ("{}-smollm2", "tc-keys-first-{}-smollm2", "frontier-{}-smollm2")
"""The results files of a text, of 8 windows, and the last of 2. A method's row is that of the first."""
BASE = "kivi-4bit"
"""Whose speed the others are held against."""
SPEED = ("bench-tc-smollm2-{}", "bench-frontier-{}")
"""The results files of a context."""
CONTEXTS = {"8K": "8k", "32K": "32k"}
METHODS = (
    "kivi-4bit",
    "kivi-3bit:sink=4,key_bits=4",
    "kvarn-k4v3:sink=4",
    "kvquant-3bit-1%",
    "kvlinc-3bit:sink=4",
    "kivi-3bit:sink=4",
    "kvquant-3bit:sink=4,datatype=nf,scales=online",
    "tc-3bit",
    "tc-3bit:basis=keys-first",
    "tc-2bit",
    "tc-2bit:basis=keys-first",
)
FEW_BITS, LEAST_PACE = 3.3, 0.9
"""What was asked of a method that replaces `BASE`: bits a value, and its speed."""


def qualities() -> dict[str, dict[str, Row]]:
    """By method, its row for each text on which it was measured."""
    found: dict[str, dict[str, Row]] = {method: {} for method in METHODS}
    for text, name in TEXTS.items():
        for file in _files(QUALITY, name):
            known = by_method(file)
            for method, own in found.items():
                if method in known:
                    own.setdefault(text, known[method])
    return {method: own for method, own in found.items() if own}


def paces(context: str) -> dict[str, float]:
    """By method, its speed at a context over that of `BASE`, in the run in which both were timed."""
    found: dict[str, float] = {}
    for file in _files(SPEED, context):
        times = {method: row["ms_per_token"] for method, row in by_method(file).items()}
        found |= {method: times[BASE] / time for method, time in times.items()}
    return found


def _files(names: tuple[str, ...], part: str) -> list[str]:
    """Those that there are."""
    every = [name.format(part) for name in names]
    return [name for name in every if (RESULTS / f"{name}.json").exists()]


@table
def frontier() -> str:
    """Each method's bits, loss on each text, and speed over that of `kivi-4bit`."""
    head = ["method", "bits per value"]
    for text in TEXTS:
        head += [f"{text}, of full", "KL"]
    head += [f"speed at {context}" for context in CONTEXTS]
    speeds = [paces(file) for file in CONTEXTS.values()]
    body = []
    for method, own in sorted(qualities().items(), key=lambda each: -bits(each[1])):
        cells = [code(method), f"{bits(own):.2f}"]
        for text in TEXTS:
            row = own.get(text)
            cells += [f"{row['ratio']:.3f}", f"{row['kl']:.3f}"] if row else ["", ""]
        cells += [f"{pace[method]:.2f}" if method in pace else "" for pace in speeds]
        body.append(cells)
    return markdown(head, body)


def bits(own: dict[str, Row]) -> float:
    """Bits a value, of the text on which they are most."""
    return max(row["bits_per_value"] for row in own.values())

"""The names that specs begin with, here, where a wrong one is refused without waiting for torch."""

from collections.abc import Iterable

NAMES = (
    *("full", "int", "nf", "kivi", "asymkv", "crosslayer", "kvquant", "xquant", "xquant-cl"),
    *("tc", "tc-cl"),
)
"""Those of `xquant.methods.METHODS`, in its order."""


def method_name(spec: str, names: Iterable[str] = NAMES) -> str:
    """The one of ``names`` that ``spec`` begins with, the longest where there are several.

    Raises:
        ValueError: it begins with none.
    """
    head = spec.strip().partition(":")[0]
    named = (n for n in names if head.startswith(n) and not head[len(n) :][:1].isalpha())
    name = max(named, key=len, default=None)
    if name is None:
        raise ValueError(f"unknown method '{spec}'; known are {', '.join(names)}")
    return name

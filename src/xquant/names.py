"""The names that specs begin with, here, where a wrong one is refused without waiting for torch."""

NAMES = (
    *("full", "int", "nf", "kivi", "asymkv", "crosslayer", "kvquant", "xquant", "xquant-cl"),
    *("tc", "tc-cl"),
)
"""Those of `xquant.methods.METHODS`, in its order."""


def method_name(spec: str) -> str:
    """The name that ``spec`` begins with, the longest where there are several.

    Raises:
        ValueError: it begins with none.
    """
    head = spec.strip().partition(":")[0]
    named = (n for n in NAMES if head.startswith(n) and not head[len(n) :][:1].isalpha())
    name = max(named, key=len, default=None)
    if name is None:
        raise ValueError(f"unknown method '{spec}'; known are {', '.join(NAMES)}")
    return name

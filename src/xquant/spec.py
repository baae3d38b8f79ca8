"""Spec strings: ``"xquant-cl-2bit:sink=1,rotate=true"`` to a method and back (``method.spec``)."""

import dataclasses
import re
from fractions import Fraction
from typing import Any

from .methods import METHODS, Method, find_installed

LABORATORY = "pip install . ./lab"
"""What brings the laboratory, in a clone."""
OF_LABORATORY = ("pyramid",)
"""The methods that it brings."""


def parse_method(spec: str | Method) -> Method:
    """The method that a spec names; a method is returned as it is.

    Raises:
        ValueError: unknown method, bits or option; the message says what is allowed.
        TypeError: ``spec`` is neither.

    Examples:
        >>> from xquant import parse_method
        >>> method = parse_method("kivi-2bit:tail=128,group=32")
        >>> type(method).__name__, method.bits, method.tail
        ('Kivi', 2, 128)
        >>> method.spec
        'kivi-2bit:tail=128,group=32'
        >>> parse_method("kivi-2bit:depth=3")
        Traceback (most recent call last):
            ...
        ValueError: kivi has no option 'depth=3'; options are ...
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"a method is a spec string or a Method, not {type(spec).__name__}")
    head, _, options = spec.strip().partition(":")
    found = _named(head)
    if found is None or found[1] is None:
        find_installed()
        found = _named(head)
    if found is None and head in OF_LABORATORY:
        raise ValueError(
            f"'{head}' is a method of the laboratory, xquant-lab: in a clone, {LABORATORY}"
        )
    if found is None:
        raise ValueError(f"unknown method '{spec}'; known are {', '.join(METHODS)}")
    cls, in_head = found
    name = cls.name
    if in_head is None:
        raise ValueError(f"'{spec}' is not how {name} is written; write it like '{cls.example}'")
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    written = [(key, text) for key, text in in_head.items() if text is not None]
    known = cls.option_help()
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, text = option.partition("=")
        if key not in known or not equals:
            raise ValueError(f"{name} has no option '{option}'; options are {', '.join(known)}")
        if key == "preset":
            if text not in cls.presets:
                raise ValueError(f"{name}: preset={text} is not one of {', '.join(cls.presets)}")
            values.update(cls.presets[text])
        else:
            written.append((key, text))
    values.update((key, _parse_value(name, key, text, kinds[key])) for key, text in written)
    return cls(**values)


def _named(head: str) -> tuple[type[Method], dict[str, str | None] | None] | None:
    """The method that what stands before the colon is of, and the options in it: the longest name where there
    are several. No options where the head is not how that method is written, nothing where there is none."""
    named = [n for n in METHODS if head.startswith(n) and not head[len(n) :][:1].isalpha()]
    matches = {n: re.fullmatch(METHODS[n].head_pattern, head[len(n) :]) for n in named}
    fitting = [n for n, match in matches.items() if match] or named
    if not fitting:
        return None
    name = max(fitting, key=len)
    match = matches[name]
    return METHODS[name], None if match is None else match.groupdict()


def _parse_value(method: str, key: str, text: str, kind: Any) -> int | float | bool | str | None:
    if kind in (int | None, float | None):
        if text == "auto":
            return None
        kind = int if kind == int | None else float
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is float:
            return float(Fraction(text))
        return int(text) if kind is int else text
    except (KeyError, ValueError, ZeroDivisionError):
        wanted = {bool: "true or false", float: "a number", int: "a whole number"}[kind]
        raise ValueError(f"{method}: {key}={text} is not {wanted}") from None

"""Spec strings: ``"xquant-cl-2bit:sink=1,rotate=true"`` to a method and back (``method.spec``)."""

import dataclasses
import re
from typing import Any

from .methods import METHODS, Method

_BITS = re.compile(r"(\d+)bit")


def parse_method(spec: str | Method) -> Method:
    """The method that a spec names; a method is returned as it is.

    Raises:
        ValueError: unknown method, bits or option; the message says what is allowed.
    """
    if isinstance(spec, Method):
        return spec
    head, _, options = spec.strip().partition(":")
    name = max((n for n in METHODS if head == n or head.startswith(n + "-")), key=len, default=None)
    if name is None:
        raise ValueError(f"unknown method '{spec}'; known are {', '.join(METHODS)}")
    cls = METHODS[name]
    values = _parse_head(cls, spec, head[len(name) :])
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in cls.head_fields()}
    for option in filter(None, options.split(",")):
        key, equals, text = option.partition("=")
        if key not in fields or not equals:
            raise ValueError(f"{name} has no option '{option}'; options are {', '.join(fields)}")
        values[key] = _parse_value(name, key, text, fields[key].type)
    return cls(**values)


def _parse_head(cls: type[Method], spec: str, rest: str) -> dict[str, Any]:
    if not cls.head_fields():
        if rest:
            raise ValueError(f"unknown method '{spec}'; {cls.name} takes no bits")
        return {}
    match = _BITS.fullmatch(rest.removeprefix("-"))
    if match is None:
        raise ValueError(f"'{spec}' does not say how many bits; write it like '{cls.example}'")
    return {"bits": int(match[1])}


def _parse_value(method: str, key: str, text: str, kind: Any) -> int | bool | str:
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return int(text) if kind is int else text
    except (KeyError, ValueError):
        wanted = "true or false" if kind is bool else "a whole number"
        raise ValueError(f"{method}: {key}={text} is not {wanted}") from None

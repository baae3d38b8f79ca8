"""What methods there are, how a spec names each, and what its options may be.

The classes of methods say this, but they import torch, which takes seconds. The command line reads it from
`FILE` instead: ``tools/catalogue.py`` writes that file, and a test holds it to the classes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
INSTALLED = "xquant.methods"
"""The entry points by which a distribution brings methods: each has the name of a method, and names its class
or the module that registers it."""
LABORATORY = "pip install . ./lab"
"""What brings the laboratory, in a clone."""
OF_LABORATORY = ("pyramid",)
"""The methods that it brings."""
FROM_A_TEXT, ITS_OWN, NONE = "from a text", "its own", "none"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method, as its class describes it."""

    name: str
    example: str
    paper: str
    summary: str
    calibration: str
    """Where the calibration of the example comes from: `FROM_A_TEXT`, `ITS_OWN` or `NONE`."""
    uncalibrated: str
    head_pattern: str
    options: dict[str, dict[str, Any]]
    """Of each option its ``type``, its ``default`` where it has one, its ``help``, and the ``choices`` or the
    bounds ``least``, ``most`` and ``step``."""
    presets: dict[str, dict[str, Any]]

    def after_colon(self) -> dict[str, dict[str, Any]]:
        """The options that do not stand in the name of a spec (as ``bits`` does)."""
        in_head = re.compile(self.head_pattern).groupindex
        return {name: option for name, option in self.options.items() if name not in in_head}

    def option_help(self) -> dict[str, str]:
        """What may follow the colon of a spec, with its meaning and default."""
        helps = {}
        for name, option in self.after_colon().items():
            text = option["help"]
            if "choices" in option:
                text += f" ({'|'.join(map(str, option['choices']))})"
            helps[name] = f"{text}, default {plain(option.get('default'))}"
        if self.presets:
            helps["preset"] = f"a configuration of the paper: {', '.join(self.presets)}"
        return helps

    def match(self, head: str) -> dict[str, str] | None:
        """The options that stand in what precedes the colon, or None where that does not name this method."""
        found = re.fullmatch(self.head_pattern, head.removeprefix(self.name))
        return found and {name: text for name, text in found.groupdict().items() if text is not None}

    def read(self, head: str, options: str) -> dict[str, Any]:
        """The values that a spec gives to options: before its colon, and after it.

        Raises:
            ValueError: an option is unknown, or is given a value that it does not allow.
        """
        written, known = list((self.match(head) or {}).items()), self.option_help()
        values: dict[str, Any] = {}
        for option in filter(None, options.split(",")):
            name, equals, text = option.partition("=")
            if name not in known or not equals:
                raise ValueError(f"{self.name} has no option '{option}'; options are {', '.join(known)}")
            if name != "preset":
                written.append((name, text))
            elif text in self.presets:
                values.update(self.presets[text])
            else:
                allowed = ", ".join(self.presets)
                raise ValueError(f"{self.name}: preset={text} is not one of {allowed}")
        for name, text in written:
            values[name] = _value(self.name, name, text, self.options[name]["type"])
            check(self.name, name, values[name], self.options[name])
        return values


def load() -> dict[str, Entry]:
    """The methods of the package by name, as `FILE` has them."""
    return {each["name"]: Entry(**each) for each in json.loads(FILE.read_text(encoding="utf-8"))}


def brought() -> dict[str, str]:
    """The names of the methods that other distributions bring, and the names of these; none is loaded."""
    found = entry_points(group=INSTALLED)
    return {each.name: each.dist.name if each.dist else each.value for each in found}


def read_spec(spec: str, find: Callable[[bool], Mapping[str, Entry]]) -> tuple[str, dict[str, Any]]:
    """The name of the method that a spec names, and the values that it gives to options.

    Args:
        find: gives the methods by name. It is called with True, to have those that other distributions bring
            among them, where one of these may be meant.

    Raises:
        ValueError: unknown method, bits or option; the message says what is allowed.
    """
    head, _, options = spec.strip().partition(":")
    for installed in (False, True):
        if installed and not any(head.startswith(name) for name in brought()):
            break
        known = find(installed)
        named = [n for n in known if head.startswith(n) and not head[len(n) :][:1].isalpha()]
        fitting = [name for name in named if known[name].match(head) is not None]
        if fitting:
            name = max(fitting, key=len)
            return name, known[name].read(head, options)
    if head in OF_LABORATORY:
        raise ValueError(f"'{head}' is a method of the laboratory, xquant-lab: in a clone, {LABORATORY}")
    if not named:
        names = ", ".join(dict.fromkeys([*known, *brought()]))
        raise ValueError(f"unknown method '{spec}'; known are {names}")
    name = max(named, key=len)
    raise ValueError(f"'{spec}' is not how {name} is written; write it like '{known[name].example}'")


def check(method: str, name: str, value: Any, option: Mapping[str, Any]) -> None:
    """Raise ValueError unless an option of ``method`` allows a value, by its choices or its bounds."""
    choices, said = option.get("choices"), f"{method}: {name}={plain(value)}"
    if choices is not None and value is not None and value not in choices:
        raise ValueError(f"{said} is not one of {', '.join(map(str, choices))}")
    if choices is None and isinstance(value, int | float):
        least, most = option.get("least", 0), option.get("most")
        if not value >= least:
            raise ValueError(f"{said} is below {least}")
        if most is not None and value > most:
            raise ValueError(f"{said} is above {most}")
        if value % (step := option.get("step", value or 1)):
            raise ValueError(f"{said} is not a multiple of {step}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to add to a message that ``name`` is not known: the nearest that is; empty where none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def plain(value: Any) -> str:
    """A value as a spec writes it."""
    if value is None:
        return "auto"
    if isinstance(value, float):
        return short(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def short(number: float) -> str:
    """A number as a spec writes it: whole where it is, never with an exponent."""
    return format(Decimal(repr(number)), "f").removesuffix(".0")


def _value(method: str, name: str, text: str, kind: str) -> int | float | bool | str | None:
    kind, _, otherwise = kind.partition(" | ")
    if otherwise and text == "auto":
        return None
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind == "float":
            return float(Fraction(text))
        return int(text) if kind == "int" else text
    except (KeyError, ValueError, ZeroDivisionError):
        wanted = {"bool": "true or false", "float": "a number", "int": "a whole number"}[kind]
        raise ValueError(f"{method}: {name}={text} is not {wanted}") from None

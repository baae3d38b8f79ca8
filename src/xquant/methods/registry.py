"""The methods that specs can name: the package's own, those of other distributions, and those of a file."""

import importlib.util
import sys
import warnings
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from ..catalogue import INSTALLED
from .base import Method

METHODS: dict[str, type[Method]] = {}
"""By the name that a spec starts with."""

Class = TypeVar("Class", bound=type[Method])


def register(method: Class) -> Class:
    """Let specs name a method: a decorator of its class.

    Whoever imports the class can then write its spec wherever a method is taken: in `KVCache`, in a saved
    cache, on the command line.

    Raises:
        ValueError: another method has the name, or the example is none of its specs.
        TypeError: it is no class of a method, or has no name.

    Examples:
        >>> from xquant import Kivi, parse_method, register
        >>> @register
        ... class Gentle(Kivi):
        ...     '''KIVI as usual, by another name.'''
        ...     name = "gentle"
        ...     example = "gentle-4bit"
        >>> parse_method("gentle-4bit:sink=4").sink
        4
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError(f"a class that derives from xquant.Method is registered, not {method!r}")
    for wanted in ("name", "paper", "summary", "example"):
        if not isinstance(getattr(method, wanted, None), str):
            raise TypeError(f"{method.__qualname__} has no '{wanted}', which a method needs")
    other = METHODS.get(method.name)
    if other is not None and _home(other) != _home(method):  # a module may be loaded anew
        raise ValueError(f"there is a method '{method.name}' already: {other.__qualname__}")
    method.entry()  # raises
    METHODS[method.name] = method
    return method


def _home(method: type[Method]) -> tuple[str, str]:
    return method.__module__, method.__qualname__


@cache
def find_installed() -> None:
    """Load what other distributions bring, once in a process. One that fails is named by a warning."""
    for each in entry_points(group=INSTALLED):
        try:
            found = each.load()
            if isinstance(found, type):
                register(found)
        except Exception as error:
            warnings.warn(
                f"xquant: the method '{each.name}' of {each.value} cannot be loaded: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def load_file(file: str | Path) -> None:
    """Run a Python file that registers methods.

    Raises:
        ValueError: it fails, or registers none.
        OSError: it cannot be read.
    """
    path = Path(file).resolve()
    name = f"xquant plugin {path}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"'{file}' is no Python file: its name does not end in .py")
    path.read_bytes()  # an error of its own where it cannot be read
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"'{file}' fails: {type(error).__name__}: {error}") from error
    if not any(method.__module__ == name for method in METHODS.values()):
        raise ValueError(f"'{file}' registers no method: decorate a class with xquant.register")


def outside() -> dict[str, Path]:
    """The files that methods from outside the package are defined in, by method."""
    found = {}
    for name, method in METHODS.items():
        module = sys.modules.get(method.__module__)
        file = getattr(module, "__file__", None)
        if file and method.__module__.partition(".")[0] != __name__.partition(".")[0]:
            found[name] = Path(file)
    return found

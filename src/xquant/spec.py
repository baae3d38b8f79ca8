"""Spec strings: ``"xquant-cl-2bit:sink=1,rotate=true"`` to a method and back (``method.spec``)."""

from .catalogue import Entry, read_spec
from .methods import METHODS, Method, find_installed


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
    name, values = read_spec(spec, entries)
    return METHODS[name](**values)


def entries(installed: bool) -> dict[str, Entry]:
    """All methods by name, with those that other distributions bring where they are asked for."""
    if installed:
        find_installed()
    return {name: method.entry() for name, method in METHODS.items()}

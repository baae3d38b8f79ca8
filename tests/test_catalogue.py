"""What the command line knows of methods without importing torch."""

from dataclasses import replace

import pytest

from xquant.catalogue import Entry, load, read_spec
from xquant.methods import METHODS


def test_the_file_is_what_the_classes_say() -> None:
    ours = [method for method in METHODS.values() if method.__module__.startswith("xquant.")]
    said = [method.entry() for method in ours]
    assert list(load().values()) == said, "python tools/catalogue.py writes it anew"


def test_a_spec_is_looked_for_among_what_is_installed_where_no_other_method_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, asked = load(), list[bool]()
    monkeypatch.setattr("xquant.catalogue.brought", lambda: {"kivi-mine": "elsewhere"})

    def find(installed: bool) -> dict[str, Entry]:
        asked.append(installed)
        brought = replace(known["kivi"], name="kivi-mine", example="kivi-mine-4bit")
        return known | ({"kivi-mine": brought} if installed else {})

    assert read_spec("kivi-4bit:sink=1", find) == ("kivi", {"bits": 4, "sink": 1})
    assert asked == [False]
    assert read_spec("kivi-mine-4bit", find) == ("kivi-mine", {"bits": 4})
    with pytest.raises(ValueError, match=r"unknown method 'nonsense'; known are full, .*kivi-mine"):
        read_spec("nonsense", find)
    assert asked == [False, False, True, False]

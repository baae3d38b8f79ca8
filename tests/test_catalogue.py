"""What the command line knows of methods without importing torch."""

from dataclasses import replace

import pytest

from xquant.catalogue import RECOMMENDED, USUAL, Entry, load, read_spec, recommended
from xquant.methods import METHODS
from xquant.spec import parse_method


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


def test_what_is_recommended_without_a_file_calibrates_itself_if_at_all() -> None:
    specs = [each.spec for each in RECOMMENDED]
    methods = {spec: parse_method(spec) for spec in specs}
    wanting = [spec for spec, m in methods.items() if m.needs_calibration and not m.calibrates_itself]
    assert recommended() == tuple(spec for spec in specs if spec not in wanting)
    assert wanting == ["kvquant-3bit-1%"]
    assert recommended(decoding=True) == ("kivi-4bit", "tc-2bit")
    assert not methods[USUAL].needs_calibration

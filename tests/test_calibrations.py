"""Which calibration serves a method."""

import pytest

from xquant import Calibration, parse_method
from xquant.calibrations import Calibrations


def made(method: str, text: str = "t") -> Calibration:
    return Calibration({}, method, model="m", text=text, version="1.0")


KVQUANT, TC = made("kvquant-2bit"), made("tc-2bit")


def test_a_method_finds_what_was_made_for_it_whatever_else_it_is_asked() -> None:
    given = Calibrations([KVQUANT, TC])
    assert list(given) == [KVQUANT, TC] and len(given) == 2
    assert given.of(parse_method("kvquant-2bit:tail=3")) is KVQUANT
    assert given.of(parse_method("tc-3.5bit:sink=1")) is TC
    assert given.of(parse_method("kivi-2bit")) is None


def test_of_two_for_the_same_methods_the_last_is_taken() -> None:
    again = made("tc-2bit", "another text")
    given = Calibrations([*Calibrations([TC, KVQUANT]), again])
    assert list(given) == [again, KVQUANT]


def test_what_is_missing_says_how_to_make_it_unless_a_cache_finds_it_itself() -> None:
    none = Calibrations()
    assert none.of(parse_method("tc-2bit")) is None and not none
    method = parse_method("kvquant-3bit-1%")
    with pytest.raises(ValueError) as refused:
        none.of(method)
    assert str(refused.value) == method.how_to_calibrate


def test_what_is_lacking_is_to_be_made_once() -> None:
    specs = (
        "kivi-2bit",
        "tc-1bit",
        "kvquant-3bit",
        "tc-3bit",
        "kvquant-2bit",
        "kvquant-3bit:tail=9",
    )
    methods = [parse_method(spec) for spec in specs]
    assert Calibrations([KVQUANT]).lacking(methods) == [methods[1], methods[2]]

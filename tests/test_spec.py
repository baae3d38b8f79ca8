import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xquant import Kivi, XQuant, XQuantCL, parse_method
from xquant.methods import METHODS
from xquant.methods.base import BITS


@st.composite
def methods(draw: Any) -> Any:
    cls = draw(st.sampled_from(list(METHODS.values())))
    values = {}
    for option in dataclasses.fields(cls):
        if "choices" in option.metadata:
            choice: Any = st.sampled_from(option.metadata["choices"])
        elif option.type is bool:
            choice = st.booleans()
        else:
            choice = st.integers(1, 256)
        if option.name == "bits" or draw(st.booleans()):
            values[option.name] = draw(choice)
    return cls(**values)


@given(methods())
def test_a_spec_names_its_method(method: Any) -> None:
    assert parse_method(method.spec) == method
    assert parse_method(method) is method
    assert str(method) == method.spec


def test_specs_are_written_as_the_papers_tables_write_them() -> None:
    assert parse_method("xquant-cl-2bit") == XQuantCL(bits=2)
    assert parse_method("xquant-16bit") == XQuant(bits=16)
    assert parse_method("kivi-2bit:rope=post") == Kivi(bits=2, rope="post")
    assert XQuant(bits=4, sink=1, rotate=True).spec == "xquant-4bit:sink=1,rotate=true"
    for cls in METHODS.values():
        assert parse_method(cls.example).spec == cls.example
        assert set(cls.option_help()) >= {"sink", "tail", "group"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown method"),
        ("turbo-2bit", "unknown method 'turbo-2bit'; known are full, kivi"),
        ("xquant", "does not say how many bits; write it like 'xquant-4bit'"),
        ("xquant-fourbit", "does not say how many bits"),
        ("xquant-5bit", "bits=5 is not one of 1, 2, 3, 4, 8, 16"),
        ("xquant-4bit:sinks=1", "xquant has no option 'sinks=1'; options are sink, tail"),
        ("xquant-4bit:sink", "has no option 'sink'"),
        ("xquant-4bit:sink=one", "sink=one is not a whole number"),
        ("xquant-4bit:sink=-1", "sink=-1 is below 0"),
        ("xquant-4bit:group=0", "group=0 is below 1"),
        ("xquant-4bit:rotate=maybe", "rotate=maybe is not true or false"),
        ("xquant-4bit:form=mqa", "form=mqa is not one of auto, mha, gqa"),
        ("xquant-cl-2bit:first_layers=0", "first_layers=0 is below 1"),
        ("full-4bit", "full takes no bits"),
    ],
)
def test_a_bad_spec_is_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_method(spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert 16 in BITS

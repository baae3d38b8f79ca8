import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xquant import (
    AsymKV,
    CrossLayer,
    Kivi,
    KVQuant,
    PredictedTransform,
    Transform,
    TurboQuant,
    XQuant,
    XQuantCL,
    parse_method,
)
from xquant.methods import METHODS
from xquant.methods.base import BITS


def values_of(option: Any) -> Any:
    """A strategy for what an option may be."""
    if "choices" in option.metadata:
        found: Any = st.sampled_from(option.metadata["choices"])
    elif option.name == "layers":
        found = st.sampled_from(("", "4", "2x4+3", "1xk4v2+3x3", "k8v2"))
    elif option.type is bool:
        found = st.booleans()
    elif option.type is float:
        found = st.floats(option.metadata.get("least", 0), option.metadata.get("most", 1))
    else:
        step = option.metadata.get("step", 1)
        found = st.integers(max(1, option.metadata.get("least", 1)), 256).map(lambda n: n * step)
    return found | st.none() if option.default is None else found


@st.composite
def methods(draw: Any) -> Any:
    cls = draw(st.sampled_from(list(METHODS.values())))
    if cls is AsymKV:
        layers = {"lk": draw(st.integers(0, 40)), "lv": draw(st.integers(0, 40))}
        return AsymKV(**(layers if draw(st.booleans()) else {"average": draw(st.floats(1, 2))}))
    values = {}
    for option in dataclasses.fields(cls):
        needed = option.default is dataclasses.MISSING
        if needed or (option.name != "dominant" and draw(st.booleans())):
            values[option.name] = draw(values_of(option))
    if values.get("layers"):  # which names all bits itself
        for other in ("first_layers", "key_bits", "value_bits", "qjl"):
            values.pop(other, None)
    if cls is TurboQuant and 1 in (values["bits"], values.get("first_bits")):
        values["qjl"] = False  # one bit is the sketch's
    if values.get("classes", 1) > 1:  # which go with some values of others alone
        for other in ("group", *cls.with_classes):
            values.pop(other, None)
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
    assert parse_method("kvquant-3bit-1%") == KVQuant(bits=3, outliers=1)
    assert parse_method("kvquant-2bit-0.5%:sink=0").spec == "kvquant-2bit-0.5%:sink=0"
    assert parse_method("asymkv-1.5bit") == AsymKV(average=1.5)
    assert parse_method("asymkv:lk=24,lv=0") == AsymKV(lk=24, lv=0)
    assert parse_method("crosslayer:kq=30,vq=2,km=32,vm=16") == CrossLayer(kq=30, vq=2, km=32, vm=16)
    assert parse_method("crosslayer:eta1=1/3").eta1 == 1 / 3
    assert parse_method("tc-1.5bit") == Transform(bits=1.5)
    assert parse_method("tc-cl-2bit:sink=1") == PredictedTransform(bits=2, sink=1)
    assert parse_method("int4-gs64").spec == "int4-gs64"
    assert parse_method("nf3").spec == "nf3"
    assert XQuant(bits=4, sink=1, rotate=True).spec == "xquant-4bit:sink=1,rotate=true"
    for cls in METHODS.values():
        assert parse_method(cls.example).spec == cls.example
        assert set(cls.entry().option_help()) >= {"sink", "tail", "group"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown method"),
        ("turbo-2bit", "unknown method 'turbo-2bit'; known are full, int"),
        ("xquant", "'xquant' is not how xquant is written; write it like 'xquant-4bit'"),
        ("xquant-fourbit", "write it like 'xquant-4bit'"),
        ("xquants-4bit", "unknown method 'xquants-4bit'"),
        ("xquant-9bit", "bits=9 is not one of 1, 2, 3, 4, 5, 6, 7, 8, 16"),
        ("xquant-4bit:sinks=1", "xquant has no option 'sinks=1'; options are sink, tail"),
        ("xquant-4bit:sink", "has no option 'sink'"),
        ("xquant-4bit:sink=one", "sink=one is not a whole number"),
        ("xquant-4bit:sink=-1", "sink=-1 is below 0"),
        ("xquant-4bit:group=0", "group=0 is below 1"),
        ("xquant-4bit:rotate=maybe", "rotate=maybe is not true or false"),
        ("xquant-4bit:form=mqa", "form=mqa is not one of auto, mha, gqa"),
        ("xquant-cl-2bit:first_layers=0", "first_layers=0 is below 1"),
        ("full-4bit", "'full-4bit' is not how full is written; write it like 'full'"),
        ("kivi-2bit:key_bits=9", "key_bits=9 is not one of 1, 2"),
        ("kvquant-3bit-11%", "kvquant: outliers=11 is above 10"),
        ("kvquant-3bit--1%", "write it like 'kvquant-3bit-1%'"),
        ("kvquant-3bit-1", "write it like 'kvquant-3bit-1%'"),
        ("kvquant-3bit-1.2.3%", "kvquant: outliers=1.2.3 is not a number"),
        ("kvquant-1bit-1%", "bits=1 is not one of 2, 3, 4, 16"),
        ("nf1", "bits=1 is not one of 2, 3"),
        ("int4-gs", "write it like 'int4-gs64'"),
        ("asymkv", "give either the average bits (asymkv-1.5bit) or both lk and lv"),
        ("asymkv-1.5bit:lk=3,lv=3", "give either the average bits"),
        ("asymkv:lk=3", "give either the average bits"),
        ("asymkv-2.5bit", "an average of 2.5 bits is not between 1 and 2"),
        ("crosslayer:eta1=0.6", "eta1=0.6 is above 0.5"),
        ("crosslayer:eta1=1/0", "eta1=1/0 is not a number"),
        ("crosslayer:eta2=nan", "eta2=nan is not a number"),
        ("crosslayer:span=2,dominant=2", "dominant=2 is not one of the 2 layers of a span"),
        ("crosslayer:gamma=1.1", "gamma=1.1 is above 1"),
        ("crosslayer:preset=gpt-4", "preset=gpt-4 is not one of mistral-7b-v0.3-truthfulqa"),
    ],
)
def test_a_bad_spec_is_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_method(spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert 16 in BITS


def test_a_preset_is_a_set_of_options_that_others_may_change() -> None:
    method = parse_method("crosslayer:preset=mistral-7b-v0.3-hotpotqa,tail=0")
    assert method == CrossLayer(kq=30, vq=2, km=32, vm=16, eta1=1 / 6, eta2=0.045, tail=0)
    assert parse_method(method.spec) == method
    assert len(CrossLayer.presets) == 16

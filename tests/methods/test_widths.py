"""Bits by layer, of keys and of values, as the option ``layers`` gives them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.methods.base import LayeredMethod
from xquant.methods.widths import Widths, read, write

LAYERS = 5
BITS = st.integers(1, 16)


@given(st.lists(st.builds(Widths, BITS, BITS), min_size=1, max_size=40))
def test_what_is_written_is_read(layers: list[Widths]) -> None:
    runs = read(write(layers))
    assert [*runs.counted] == layers and runs.rest is None
    assert [count for count in range(50) if runs.fits(count)] == [len(layers)]


@pytest.mark.parametrize(
    "spec",
    [
        *("kivi-3bit:layers=2x4+k3v2", "quarot-3bit:layers=2x4+k3v2", "kvlinc-3bit:layers=2x4+k3v2"),
        *("turboquant-3bit:layers=2x4+k3v2", "int3:layers=2x4+k3v2"),
        "nf3:layers=2x4+k3v2",
    ],
)
def test_a_cache_holds_the_bits_that_are_asked_for(spec: str) -> None:
    method = parse_method(spec)
    assert isinstance(method, LayeredMethod)
    assert [*map(method.layer_widths, range(4))] == [(4, 4), (4, 4), (3, 2), (3, 2)]
    assert parse_method(method.spec) == method
    model = tiny("llama")
    cache = KVCache(model, method)
    model(prompt(1, 2 * method.group), cache=cache)
    assert cache.report().code_bits == (2 * 4 + 3 * 2.5) / LAYERS


@pytest.mark.parametrize("named", ["kivi-4bit:key_bits=3,first_layers=1", "quarot-4bit:first_layers=2"])
def test_bits_named_by_other_options_can_be_written_by_layer(named: str) -> None:
    method = parse_method(named)
    assert isinstance(method, LayeredMethod)
    layers = [*map(method.layer_widths, range(LAYERS))]
    same = method.with_widths(layers)
    assert [*map(same.layer_widths, range(LAYERS))] == layers
    assert "first_layers" not in same.spec and "key_bits" not in same.spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kivi-3bit:layers=9x4", "of 9 layers, but 5 are compressed"),
        ("kivi-3bit:layers=4x4", "of 4 layers, but 5 are compressed"),
        ("kivi-3bit:layers=6x4+3", "of 6 layers, but 5 are compressed"),
        ("kivi-3bit:layers=4+4", "not written like"),
        ("kivi-3bit:layers=0x4+3", "not written like"),
        ("kivi-3bit:layers=k4", "not written like"),
        ("kivi-3bit:layers=k9v4", "bits=9 is not one of"),
        ("quarot-3bit:layers=2x16+3", "bits=16 is not one of"),
        ("kivi-3bit:layers=4,first_layers=2", "either layers or first_layers"),
        ("kivi-3bit:layers=4,value_bits=2", "layers=k4v2"),
        ("turboquant-3bit:qjl=true,layers=k1v2", "qjl=true needs 2 bits"),
        ("xquant-4bit:form=mha,layers=k4v2", "both come from X"),
        ("tc-2bit:layers=4", "no option 'layers=4'"),
    ],
)
def test_other_layers_are_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        KVCache(tiny("llama"), spec)
    assert "\n" not in str(refused.value)

"""Bits move to where they are worth most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models import prompt, tiny
from xquant import parse_method
from xquant.methods.base import LayeredMethod
from xquant_lab.evals.widths import move_bits, worthwhile

PLACES = [(layer, part) for layer in range(3) for part in ("keys", "values")]


def anywhere(place: tuple[int, str], by: int) -> bool:
    return -2 <= by <= 2


def test_a_bit_moves_where_it_gains_more_than_it_costs() -> None:
    keys, values = (0, "keys"), (0, "values")
    sizes = {keys: 64, values: 64}
    # A bit less multiplies by 4: it gains 3/4 of one and costs 3 times the other.
    assert worthwhile({keys: 1.0, values: 0.24}, sizes, anywhere) == [(keys, values)]
    assert worthwhile({keys: 1.0, values: 0.26}, sizes, anywhere) == []
    assert worthwhile({keys: 1.0, values: 0.0}, {keys: 64, values: 32}, anywhere) == []
    assert worthwhile({keys: 1.0, values: 0.0}, sizes, lambda place, by: by >= 0) == []


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6), st.lists(st.integers(1, 2), min_size=6, max_size=6))
def test_moves_take_no_byte_and_lose_less(divergences: list[float], sizes: list[int]) -> None:
    found = dict(zip(PLACES, divergences, strict=True))
    size = dict(zip(PLACES, sizes, strict=True))
    more = dict.fromkeys(PLACES, 0)
    before = sum(divergences)
    for to, of in worthwhile(found, size, anywhere):
        assert size[to] == size[of]
        more[to], more[of] = more[to] + 1, more[of] - 1
        assert anywhere(to, more[to]) and anywhere(of, more[of])
        after = sum(found[place] * 4.0**-by for place, by in more.items())
        assert after <= before * (1 + 1e-9)
        before = after


@pytest.mark.parametrize(
    "spec", ["kivi-3bit:group=16", "quarot-2bit:group=16,first_layers=1", "xquant-3bit:group=16,form=mha"]
)
def test_what_is_found_takes_as_many_bytes_and_is_no_worse(spec: str) -> None:
    method = parse_method(spec)
    assert isinstance(method, LayeredMethod)
    before, after = move_bits(tiny("llama"), prompt(2, 65), method)
    assert before.method == method.spec
    assert after.kl <= before.kl
    assert (after.cache_bytes, after.code_bits) == (before.cache_bytes, before.code_bits)

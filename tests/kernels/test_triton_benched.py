"""The Triton kernels at the shapes that are timed: wide heads, blocks of 128 tokens, groups of 4 heads."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from support import triton_interpreter
from support.attention_cases import DEVICE, TOLERANCE, Case, error, filled

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()

BLOCK = 128
SPECS = [
    "kivi-4bit",
    "kivi-4bit:rope=post",
    "kvquant-4bit-1%",
    "xquant-4bit",
    "xquant-cl-4bit:first_layers=1",
]


def case(spec: str, size: int, tokens: int, **options: Any) -> Case:
    layers = 2 if "cl" in spec else 1
    return Case(spec, size, 1, 4, tokens=tokens, path="triton", layers=layers, **options)


@pytest.mark.parametrize(("size", "tail"), [(64, 1), (64, 127), (128, 0), (128, 64), (128, 127)])
@pytest.mark.parametrize("spec", SPECS)
def test_tokens_behind_whole_blocks(spec: str, size: int, tail: int) -> None:
    """The newest among them."""
    one = case(spec, size, 2 * BLOCK + tail)
    cache = filled(one)
    assert {layer.stream.tokens for layer in cache.compressed} == {2 * BLOCK}
    assert error(one, cache) < TOLERANCE


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("spec", SPECS)
def test_sequences_of_unequal_length(spec: str, mask: str) -> None:
    one = case(spec, 128, 2 * BLOCK + 64, batch=2, mask=mask)
    assert error(one, filled(one)) < TOLERANCE


@pytest.mark.parametrize("spec", SPECS)
def test_states_in_the_type_that_is_timed(spec: str) -> None:
    one = case(spec, 128, 2 * BLOCK + 64, dtype=torch.bfloat16)
    # Rebuilt keys and values are rounded to it by the reference only.
    assert error(one, filled(one)) < (6 if "xquant" in spec else 2) * 2**-8


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", ["kivi-4bit", "kivi-2bit:rope=post", "xquant-4bit"])
def test_values_that_average_out_leave_no_error(spec: str) -> None:
    """Of so many tokens with equal weights, the result is a small part of each value."""
    one = case(spec, 128, 32 * BLOCK + 1, query_size=1e-3)
    # The matrix units of a GPU add up with fewer bits than the interpreter.
    assert error(one, filled(one)) < (TOLERANCE if DEVICE.type == "cpu" else 5e-3)

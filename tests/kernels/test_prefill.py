"""Attention of many queries over states as they are: the library's against torch's, in fp64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.examples import examples
from xquant.kernels.cpu import library as native
from xquant.kernels.cpu.prefill import NativePrefill
from xquant.past.exact import Scoring, States, torch_attention

ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of the highest number. Weights are rounded as states are, where a CPU multiplies bf16."""

pytestmark = pytest.mark.skipif(not native.isas(), reason="no native library")


def laid(states: Tensor, gaps: bool) -> Tensor:
    """The same, or the same between other numbers."""
    if not gaps:
        return states
    tokens, heads, size = states.shape
    among = torch.full((tokens + 1, heads + 2, size + 3), torch.nan, dtype=states.dtype)
    found = among[1:, 1:-1, :size]
    found.copy_(states)
    return found


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 8]))
    return {
        "counts": counts,
        "pasts": [draw(st.sampled_from([0, 1, 15, 16, 63, 64, 200, 255, 256, 300])) for _ in counts],
        "heads": (kv_heads * group, kv_heads),
        "size": draw(st.sampled_from([1, 8, 16, 33, 64, 80, 96, 128, 256])),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "logits": draw(st.booleans()),
        "gaps": draw(st.booleans()),
        "dtype": draw(st.sampled_from([*ERRORS])),
        "isa": draw(st.sampled_from(native.isas())),
        "seed": draw(st.integers(0, 1000)),
    }


def made(asked: dict[str, Any]) -> tuple[Tensor, list[States], Scoring]:
    torch.manual_seed(asked["seed"])
    (heads, kv_heads), size, dtype = asked["heads"], asked["size"], asked["dtype"]
    query = torch.randn(sum(asked["counts"]), heads, size).to(dtype)
    states: list[States] = []
    for count, past in zip(asked["counts"], asked["pasts"], strict=True):
        keys, values = (torch.randn(count + past, kv_heads, size).to(dtype) for _ in range(2))
        states.append((laid(keys, asked["gaps"]), laid(values, asked["gaps"])))
    scaling, logits = 1.5 / size**0.5, torch.randn(heads) if asked["logits"] else None
    return laid(query, asked["gaps"]), states, Scoring(scaling, asked["softcap"], logits)


@settings(max_examples=examples(60), deadline=None)
@given(prompts())
def test_prompts_are_read_as_torch_reads_them(asked: dict[str, Any]) -> None:
    query, states, scoring = made(asked)
    found = NativePrefill(asked["isa"])(query, states, asked["counts"], scoring)
    exact = [(keys.double(), values.double()) for keys, values in states]
    wanted = torch_attention(query.double(), exact, asked["counts"], scoring)
    assert found.dtype == query.dtype
    assert found.shape == query.shape
    assert (found.double() - wanted).abs().max() < ERRORS[asked["dtype"]] * wanted.abs().max().clamp(min=0.1)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("isa", native.isas())
def test_a_token_gets_the_same_however_a_prompt_is_cut(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, attend, scoring = 700, NativePrefill(isa), Scoring(0.2)
    query = torch.randn(tokens, 6, 64).to(dtype)
    keys, values = (torch.randn(tokens, 2, 64).to(dtype) for _ in range(2))
    whole = attend(query, [(keys, values)], [tokens], scoring)
    first = 0
    for count in (1, 130, 63, 500, 6):
        end = first + count
        own, others = (keys[:end], values[:end]), (values[:40], keys[:40])
        queries = torch.cat([query[:40], query[first:end]])
        cut = attend(queries, [others, own], [40, count], scoring)
        assert torch.equal(cut[40:], whole[first:end])
        first = end


def test_states_of_another_kind_are_refused() -> None:
    attend, query, keys = NativePrefill(native.isas()[0]), torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match="kernel wants"):
        attend(query, [(keys, keys.half())], [3], Scoring(1.0))
    with pytest.raises(ValueError, match="kernel wants"):
        attend(query, [(keys, keys[:2])], [3], Scoring(1.0))

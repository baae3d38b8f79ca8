"""Every way to turn a head is that of halves, in another order of channels."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.attention_cases import decoding_error
from support.caches import make_cache
from support.models import FAMILIES, OTHERS, prompt, tiny
from xquant import KVCache, attach
from xquant.kernels.cpu import library as native
from xquant.models.probe import as_slice, by_token, find_channels
from xquant.models.rotation import apply_rope, as_halves, form_of, orders


def turned_directly(x: torch.Tensor, angles: torch.Tensor, pairs: str, sign: int) -> torch.Tensor:
    """Heads ``[B, T, G, D]`` with their first channels as complex numbers, by angles ``[T, R/2]``."""
    width = 2 * angles.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    real, imaginary = (head[..., ::2], head[..., 1::2]) if pairs == "neighbours" else head.chunk(2, -1)
    numbers = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), sign * angles).unsqueeze(
        1
    )
    if pairs == "neighbours":
        head = torch.view_as_real(numbers).flatten(-2)
    else:
        head = torch.cat([numbers.real, numbers.imag], -1)
    return torch.cat([head, rest], -1)


@given(
    half=st.integers(1, 8),
    passed=st.integers(0, 6),
    pairs=st.sampled_from(["halves", "neighbours"]),
    sign=st.sampled_from([1, -1]),
)
def test_one_order_fits_each_way(half: int, passed: int, pairs: str, sign: int) -> None:
    generator = torch.Generator().manual_seed(half + 10 * passed)
    x = torch.randn(1, 5, 2, 2 * half + passed, generator=generator).double()
    angles = torch.rand(5, half, generator=generator).double() + 0.1
    want = turned_directly(x, angles, pairs, sign)
    cos, sin = (torch.cat([t, t], -1)[None] for t in (angles.cos(), angles.sin()))
    found = [
        order
        for order in orders(x.shape[-1], 2 * half)
        if torch.allclose(apply_rope(x[..., order], cos, sin), want[..., order])
    ]
    assert found and all(sorted(order.tolist()) == list(range(x.shape[-1])) for order in found)


def test_a_table_is_read_in_every_form() -> None:
    angles = torch.rand(1, 4, 6) + 0.1
    cos, sin = angles.cos(), angles.sin()
    tables: dict[str, Any] = {
        "halves": tuple(torch.cat([t, t], -1) for t in (cos, sin)),
        "neighbours": tuple(t.repeat_interleave(2, -1) for t in (cos, sin)),
        "once": (cos, sin),
        "complex": torch.complex(cos, sin),
    }
    for form, table in tables.items():
        assert form_of(table) == form
        for found, want in zip(as_halves(table, form), tables["halves"], strict=True):
            assert torch.equal(found, want)
    with pytest.raises(TypeError, match="gives a list"):
        form_of([cos, sin])


def test_channels_are_found_wherever_they_are() -> None:
    among = torch.randn(11, 30)
    order = torch.randperm(30)[:12]
    assert find_channels(among[:, order], among).equal(order)
    assert find_channels(among[:, :3] + 1, among) is None
    assert as_slice(torch.arange(4, 9)) == slice(4, 9)
    assert by_token(torch.zeros(1, 2, 11, 3)).shape == by_token(torch.zeros(1, 11, 2, 3)).shape


@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHERS} - {"deepseek_v3", "gemma4"}))
def test_the_view_gives_what_the_model_does(family: str) -> None:
    """Keys and values computed from X, in every layer that is compressed."""
    model = tiny(family)
    cache = KVCache(model, "xquant-16bit:group=8,form=mha")  # refuses what the view does not give
    with torch.no_grad():
        model(prompt(1, 20), past_key_values=cache, use_cache=True)
    for layer in cache.compressed:
        assert layer.get_seq_length() == 20


def test_a_view_made_in_inference_mode_can_be_used_outside() -> None:
    model = tiny("glm4")
    with torch.inference_mode():
        cache = KVCache(model, "kivi-16bit:group=8")
    assert model(prompt(1, 20), past_key_values=cache, use_cache=True).logits.requires_grad


def test_asking_a_layer_leaves_no_trace() -> None:
    model = tiny("cohere2").train()
    state = torch.random.get_rng_state()
    attach(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("glm4", "kivi-4bit:group=32,sink=2"),
        ("glm4", "xquant-4bit:group=32"),
        ("gpt_neox", "kivi-2bit:group=32"),
        ("gpt_neox", "tc-4bit:group=32"),
        ("qwen3_next", "kivi-4bit:group=32"),
    ],
)
def test_native_kernels_read_neighbours_and_parts_of_heads(family: str, spec: str) -> None:
    sizes = {"head_dim": 32} if family != "gpt_neox" else {}
    model = tiny(family, hidden_size=128, initializer_range=0.05, **sizes)
    assert decoding_error(model, spec, "auto", [90, 61], steps=3) < 1e-3
    cache = make_cache(model, spec)
    with torch.no_grad():
        for ids in prompt(1, 70).split([69, 1], 1):
            model(ids, past_key_values=cache, use_cache=True)
    assert cache.kernel == native.isas()[0]

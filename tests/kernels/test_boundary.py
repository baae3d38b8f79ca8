"""What goes to native code and Triton: states of any dtype, in any strides, are read right or refused."""

from functools import cache as memoize
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from support.attention_cases import STRIDES, TOLERANCES, Case, exact, filled, laid, mask_for
from support.caches import make_cache
from support.examples import examples
from support.models import prompt, tiny
from xquant import KVCache, StaticKVCache
from xquant.kernels.call import FLOATS, AttentionCall
from xquant.kernels.cpu import library as native
from xquant.kernels.cpu.sealing import NativePacker
from xquant.past.packer import TORCH
from xquant.quant import Affine
from xquant.quant.quantizer import dense

PATHS = (*native.isas(), "folded")
SPECS = ["kivi-4bit:group=32,sink=2", "nf4:group=32,rope=post", "quarot-4bit:group=32"]
SPECS += ["xquant-4bit:group=32,sink=2", "xquant-3bit:group=32,form=mha", "tc-3bit:group=32"]
needs_native = pytest.mark.skipif(not native.isas(), reason="no native library, or no CPU for it")
seeds = st.integers(0, 2**32 - 1)
layouts = st.sampled_from(STRIDES)
BLOCK = 32


@memoize
def case_of(spec: str, path: str, mask: str) -> tuple[Case, KVCache]:
    one = Case(spec, batch=2, queries=3, tokens=110, path=path, mask=mask, layers=2)
    return one, filled(one)


@st.composite
def calls(draw: Any) -> tuple[str, str, str, AttentionCall]:
    spec, path = draw(st.sampled_from(SPECS)), draw(st.sampled_from(PATHS))
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    one, cache = case_of(spec, path, kind)
    generator = torch.Generator().manual_seed(draw(seeds))
    given = []
    for heads in (one.kv_heads * one.group_heads, one.kv_heads, one.kv_heads):
        shape = (one.batch, heads, one.queries, one.head_size)
        dtype = draw(st.sampled_from(FLOATS if not given else (*FLOATS, torch.float64)))
        states = torch.randn(shape, generator=generator).to(dtype)
        given.append(laid(states, draw(layouts)))
    mask = mask_for(one, cache)
    if mask is not None:
        mask = mask.to(draw(st.sampled_from(FLOATS))) if kind == "float" else mask
        mask = mask.mT.contiguous().mT if draw(st.booleans()) else mask
    call = AttentionCall(*given, mask, one.head_size**-0.5, draw(st.sampled_from([None, 5.0])))
    return spec, path, kind, call


@settings(max_examples=examples(200), deadline=None)
@given(calls())
def test_mixed_states_are_read_right(drawn: tuple[str, str, str, AttentionCall]) -> None:
    spec, path, kind, call = drawn
    _, cache = case_of(spec, path, kind)
    query, key, value, mask = call[:4]
    tolerance = 0.1 if spec.startswith("tc-") else TOLERANCES[query.dtype]
    for layer in cache.compressed:
        index = layer.codec.view.index
        found = cache.attend(index, call)
        assert found is not None and found.dtype == query.dtype
        keys, values, seen = cache.answer(index, key, value, mask)
        want = exact(query, keys, values, seen, call.softcap)
        assert (found.double() - want).norm() < tolerance * want.norm()
    cache.finish()


@needs_native
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3], SPECS[5]])
@pytest.mark.parametrize("which", ["query", "key", "value", "mask"])
def test_states_of_another_size_or_elsewhere_are_refused(spec: str, which: str) -> None:
    one, cache = case_of(spec, PATHS[0], "bool")
    heads = one.kv_heads * one.group_heads
    query = torch.randn(one.batch, heads, one.queries, one.head_size)
    key = query[:, : one.kv_heads]
    call = AttentionCall(query, key, key, mask_for(one, cache), 1.0, None)
    usual: Tensor = getattr(call, which)
    wrong = [usual.to("meta")]
    if which != "mask":
        wrong += [usual[:1], usual[:, :1], usual[..., :16]]
    for states in wrong:
        with pytest.raises(ValueError, match=f"a kernel wants a {which} ") as error:
            cache.attend(0, call._replace(**{which: states}))
        assert "\n" not in str(error.value)
    unread = [query.double()] if which == "query" else [usual[..., :-1]] * (which == "mask")
    for states in unread:  # torch says what is wrong, if anything is
        assert cache.attend(0, call._replace(**{which: states})) is None
    cache.finish()


@needs_native
@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(native.isas() or ("none",)), st.sampled_from(FLOATS), layouts, seeds)
def test_blocks_of_any_strides_are_packed_as_in_torch(
    isa: str, dtype: torch.dtype, layout: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = laid(torch.randn(3, BLOCK, 64, generator=generator).to(dtype), layout)
    excluded = laid(torch.rand(3, BLOCK, 1, generator=generator) < 0.1, layout)[..., 0]
    packer = NativePacker(isa)
    for quantizer in (Affine(4, "channel", 32), Affine(3, "token", 16)):
        packed = packer.pack(quantizer, x, excluded)
        wanted = TORCH.pack(quantizer, x, excluded)
        for name in wanted:
            assert torch.equal(dense(packed, name), dense(wanted, name))
        out, plain = laid(torch.zeros(x.shape, dtype=dtype), layout), torch.zeros(x.shape)
        if layout != "expanded":  # torch refuses to write it
            packer.unpack(quantizer, packed, out)
            TORCH.unpack(quantizer, wanted, plain)
            torch.testing.assert_close(out.float(), plain, rtol=1e-2, atol=1e-2)


@needs_native
def test_blocks_elsewhere_or_of_another_type_are_refused() -> None:
    packer, x = NativePacker(native.isas()[0]), torch.randn(2, BLOCK, 64)
    for excluded in (torch.zeros(2, BLOCK), torch.zeros(2, 8, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"a kernel wants torch\.bool"):
            packer.pack(Affine(4, "channel", 32), x, excluded)
    with pytest.raises(ValueError, match="a kernel wants a tensor on the CPU"):
        packer.pack(Affine(4, "channel", 32), x, torch.zeros(2, BLOCK, dtype=bool, device="meta"))


AUTOCAST = ["kivi-8bit:group=32", "nf4:group=32", "xquant-8bit:group=32", "kivi-8bit:rope=post"]


@torch.no_grad()
def steps(model: Any, cache: Any, ids: Tensor, parts: tuple[int, ...]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = [model(part, past_key_values=cache).logits for part in ids.split(parts, 1)]
    return torch.cat(logits, 1).float()


@pytest.mark.parametrize("form", [*PATHS, "reference", "static"])
@pytest.mark.parametrize("spec", AUTOCAST)
def test_a_model_in_fp32_under_autocast(spec: str, form: str) -> None:
    """Queries and keys are of its own type, values of autocast's."""
    model, ids = tiny("llama", initializer_range=0.1, head_dim=32, hidden_size=64), prompt(1, 120)
    parts = (70, 1, 1, 20, 1, 1, 26)
    want = steps(model, DynamicCache(config=model.config), ids, parts)
    cache: Any
    if form == "static":
        cache = StaticKVCache(model, spec, room=128)
    else:
        cache = make_cache(model, spec, kernel=form)
    found = steps(model, cache, ids, parts)
    limit = 0.05 if spec.startswith("nf4") else 0.02
    assert float((found - want).norm()) < limit * float(want.norm())


def test_a_static_cache_goes_on_under_autocast() -> None:
    model, ids = tiny("llama", head_dim=32), prompt(1, 60)
    cache = StaticKVCache(model, "kivi-8bit:group=32", room=64)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        with torch.autocast("cpu", torch.bfloat16):
            model(ids[:, 40:41], past_key_values=cache)
        with pytest.raises(ValueError, match=r"gives torch\.bfloat16 states"):
            model.bfloat16()(ids[:, 41:42], past_key_values=cache)

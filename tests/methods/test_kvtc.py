"""KVTC: bits where they are worth most, and a past that many layers pack together."""

from pathlib import Path

import pytest
import torch

from support.caches import calibration, make_cache
from support.mixed_layers import alike, error, filled, recalls_as_converted, states
from support.models import prompt, tiny
from support.saved_caches import loaded
from xquant import KVCache, PrefixStore, parse_method
from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.methods.kvtc import RANGE_BITS, Group, choices, chosen

ALL, SOME = "kvtc-4bit:group=16,tail=0", "kvtc-4bit:group=16,tail=5,span=3"
JOINT = "kvtc-4bit:group=16,tail=0,basis=joint"


def all_ways(components: int, start: int = 0) -> list[list[Group]]:
    """All ways to cut the components from ``start`` on into groups."""
    if start >= components:
        return [[]]
    return [
        [group, *rest]
        for group in choices(components)
        if group.start == start
        for rest in all_ways(components, start + group.size)
    ]


def cost(groups: list[Group], last: int = 16) -> int:
    """Bits of a token, with a last group that counts as full."""
    return sum(-(-g.size // last) * last * g.bits + RANGE_BITS for g in groups if g.bits)


@pytest.mark.parametrize("components", [16, 40, 80])
@pytest.mark.parametrize("budget", [0, 64, 200, 500])
def test_no_other_groups_of_as_few_bits_lose_less(components: int, budget: int) -> None:
    error = torch.rand(len(choices(components)), generator=torch.Generator().manual_seed(budget))
    of = dict(zip(choices(components), error.tolist(), strict=True))
    found = chosen(error, components, budget)
    assert cost(found) <= budget
    left_out = set(range(0, components, 16))
    for group in found:
        left_out -= set(range(group.start, group.start + group.size, 16))
    lost = sum(of[group] for group in found)
    lost += sum(of[group] for group in of if group.start in left_out and not group.bits)
    allowed = [way for way in all_ways(components) if cost(way) <= budget // 32 * 32]
    assert lost == pytest.approx(min(sum(of[group] for group in way) for way in allowed))


def test_bits_are_spent_where_nothing_was_measured() -> None:
    blank = torch.zeros(len(choices(960)))
    assert cost(chosen(blank, 960, 960)) == 960


@pytest.mark.parametrize("bits", [1.5, 2, 4])
@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "gemma2", "phi3"])
def test_scales_and_zeros_are_within_the_bits(family: str, bits: float) -> None:
    model, spec = tiny(family), f"kvtc-{bits}bit:group=16,tail=0,sink=0"
    cache = filled(model, spec, 64)
    values = sum(2 * 64 * layer.codec.view.state_width for layer in cache.compressed)
    held = sum(layer.stream.nbytes for layer in cache.compressed)
    assert 8 * held / values == cache.report().bits_per_value
    assert 0.6 * bits < cache.report().bits_per_value <= bits


def test_sinks_and_recent_tokens_are_exact() -> None:
    model = tiny("llama")
    full = filled(model, "full:group=16", 60)
    cache = filled(model, "kvtc-2bit:group=16,tail=5", 60)
    for found, true in zip(states(cache), states(full), strict=True):
        torch.testing.assert_close(found[:, :, :4], true[:, :, :4], atol=2e-3, rtol=2e-3)
        # The layers below attended by another implementation, which rounds otherwise.
        torch.testing.assert_close(found[:, :, -12:], true[:, :, -12:], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(found[:, :, 4:48], true[:, :, 4:48], atol=2e-3, rtol=2e-3)


def test_more_bits_lose_less() -> None:
    model = tiny("qwen3")
    full = filled(model, "full:group=16", 64)
    lost = [error(filled(model, f"kvtc-{bits}bit:group=16,tail=0", 64), full) for bits in (1, 2, 4, 8)]
    assert lost == sorted(lost, reverse=True) and lost[3] < 0.1 * lost[0]


def test_keys_and_values_that_tell_of_each_other_lose_less_together() -> None:
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.copy_(layer.self_attn.k_proj.weight)
    full = filled(model, "full:group=16", 96)
    joint, apart = (filled(model, spec, 96) for spec in (JOINT, ALL))
    assert error(joint, full) < error(apart, full)


def test_layers_that_are_alike_lose_less_together() -> None:
    model = alike()
    full = filled(model, "full:group=16", 96)
    together, apart = (filled(model, f"kvtc-4bit:group=16,tail=0,span={n}", 96) for n in (0, 1))
    assert error(together, full) < error(apart, full)


@pytest.mark.parametrize("spec", [ALL, SOME, JOINT])
def test_what_is_recalled_does_not_depend_on_how_tokens_came(spec: str) -> None:
    recalls_as_converted(spec)


@pytest.mark.parametrize("pack", [None, "entropy"])
@pytest.mark.parametrize("spec", [ALL, SOME, JOINT])
def test_a_file_holds_the_same(spec: str, pack: str | None, tmp_path: Path) -> None:
    cache = filled(tiny("llama"), spec, 64)
    other = loaded(cache, tmp_path / "c", pack=pack)
    assert other.nbytes == cache.nbytes
    for found, kept in zip(states(other), states(cache), strict=True):
        assert torch.equal(found, kept)


def test_a_store_of_prefixes_holds_the_same(tmp_path: Path) -> None:
    model, ids = tiny("llama"), prompt(1, 150)
    made = calibration(model, ALL)
    cache = KVCache(model, ALL, calibration=made)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    store = PrefixStore(tmp_path, model, ALL, "1GB", made)
    assert store.put(cache, ids) == [128]
    found = store.get(ids)
    assert found is not None
    for got, kept in zip(states(found), states(cache), strict=True):
        assert torch.equal(got, kept[:, :, :128])


def test_a_cache_is_converted_to_it() -> None:
    model = tiny("llama")
    full = filled(model, "full:group=16", 64)
    found = full.converted("kvtc-8bit:group=16,tail=0", calibration(model, ALL))
    direct = filled(model, "kvtc-8bit:group=16,tail=0", 64)
    assert error(found, full) == pytest.approx(error(direct, full), rel=0.05)


def test_tokens_cannot_read_themselves_before_the_layers_above_are_known() -> None:
    with pytest.raises(ValueError, match="codes layers together"):
        make_cache(tiny("llama"), ALL, "store")
    assert make_cache(tiny("llama"), "kvtc-4bit:group=16,tail=0,span=1", "store")


def test_too_few_bits_for_any_group_are_refused() -> None:
    with pytest.raises(ValueError, match="no group of components takes so few bits: take more"):
        make_cache(tiny("llama"), "kvtc-0.1bit:span=1")


def test_a_plan_without_numbers_spends_the_bits() -> None:
    model = tiny("llama")
    layout = CacheLayout(Skeleton(model.config, torch.float32), parse_method(ALL))
    cache = filled(model, ALL, 64)
    held, report = layout.count(64, 2), cache.report()
    assert layout.estimated
    assert (held.sinks, held.tail, held.index) == (
        report.sink_bytes,
        report.tail_bytes,
        report.index_bytes,
    )
    assert held.total == pytest.approx(report.cache_bytes, rel=0.3)

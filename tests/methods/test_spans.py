"""Layers of `tc-cl` that are coded together: the same bytes as apart, read in every way that a cache is."""

from pathlib import Path

import pytest
import torch

from support.caches import make_cache
from support.mixed_layers import alike, error, filled, recalls_as_converted, states
from support.models import tiny
from support.saved_caches import loaded
from xquant.calibrators.bases import dealt_out

APART, TOGETHER = (
    "tc-cl-2bit:group=16,embedding=false",
    "tc-cl-2bit:group=16,embedding=false,span=3",
)


def test_layers_get_loud_and_quiet_channels_alike() -> None:
    places = dealt_out([3, 3, 2])
    assert sorted(torch.cat(places).tolist()) == list(range(8))
    assert [len(own) for own in places] == [3, 3, 2]
    assert all(int(own[0]) < 3 for own in places)


def test_together_they_take_the_same_bytes_and_lose_less() -> None:
    model = alike()
    full = filled(model, "full:group=16", 96)
    spec = "tc-cl-1bit:group=16,metric=identity,embedding=false,reach=1"
    apart, together = filled(model, spec, 96), filled(model, spec + ",span=3", 96)
    assert sum(layer.stream.nbytes for layer in together.compressed) == sum(
        layer.stream.nbytes for layer in apart.compressed
    )
    assert error(together, full) < error(apart, full)


@pytest.mark.parametrize("reach", [1, 2, 5])
@pytest.mark.parametrize("span", [2, 3, 8])
def test_what_is_recalled_does_not_depend_on_how_tokens_came(span: int, reach: int) -> None:
    recalls_as_converted(f"tc-cl-3bit:group=16,span={span},reach={reach}")


def test_a_file_and_another_method_hold_the_same(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = filled(model, TOGETHER, 64)
    for found, kept in zip(states(loaded(cache, tmp_path / "c")), states(cache), strict=True):
        assert torch.equal(found, kept)
    other = cache.converted("full:group=16")
    for found, kept in zip(states(other), states(cache), strict=True):
        assert torch.allclose(found, kept, atol=1e-4)


def test_tokens_cannot_read_themselves_before_the_layers_above_are_known() -> None:
    with pytest.raises(ValueError, match="codes layers together"):
        make_cache(tiny("llama"), TOGETHER, "store")

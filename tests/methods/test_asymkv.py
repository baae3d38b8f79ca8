"""AsymKV: which layers get the wide codes."""

import pytest

from support.models import tiny
from xquant import AsymKV, KVCache


@pytest.mark.parametrize(
    ("average", "layers", "wide"),
    [
        (1.5, 32, (32, 0)),  # the paper's AsymKV-32/0
        (1.375, 32, (24, 0)),
        (1.75, 32, (32, 16)),
        (1.0, 32, (0, 0)),
        (2.0, 30, (30, 30)),
        (1.5, 5, (5, 0)),
    ],
)
def test_keys_get_the_wide_layers_first(average: float, layers: int, wide: tuple[int, int]) -> None:
    assert AsymKV(average=average).wide_layers(layers) == wide
    assert sum(AsymKV(average=average).wide_layers(layers)) == round((average - 1) * 2 * layers)


def test_layers_may_be_given() -> None:
    assert AsymKV(lk=3, lv=5).wide_layers(5) == (3, 5)
    cache = KVCache(tiny("llama"), "asymkv:lk=3,lv=1")
    widths = [[s.quantizer.bits for s in c.stream.segments] for c in cache.compressed]
    assert widths == [[2, 2], [2, 1], [2, 1], [1, 1], [1, 1]]
    with pytest.raises(ValueError, match="lk=6 but 5 layers are compressed"):
        KVCache(tiny("llama"), "asymkv:lk=6,lv=1")

"""KVQuant: what it takes from a calibration."""

import pytest
import torch

from support.caches import calibration, make_cache
from support.models import tiny
from xquant.quant import Codebook


@pytest.mark.parametrize("options", ["", ",per=matrix", ",scales=online"])
def test_keys_and_values_have_the_levels_that_were_found_for_each(options: str) -> None:
    model, spec = tiny("llama"), f"kvquant-2bit-5%:group=8{options}"
    made = calibration(model, spec)
    assert made is not None
    for i, layer in enumerate(make_cache(model, spec).compressed):
        found = made.layer(i)
        assert not torch.equal(found["key.levels"], found["value.levels"])
        for segment, name in zip(layer.stream.segments, ("key", "value"), strict=True):
            assert isinstance(segment.quantizer, Codebook)
            assert torch.equal(segment.quantizer.levels, found[f"{name}.levels"].half())

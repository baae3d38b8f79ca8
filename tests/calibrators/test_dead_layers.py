"""Layers of which a calibration learns nothing: what they keep is never read, or is always the same."""

import pytest
import torch

from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.calibrators.run import calibrate_on

DEAD = {
    "nothing reads it": ["o_proj"],
    "its values are 0": ["v_proj"],
    "its keys are 0": ["k_proj"],
    "all it keeps is 0": ["k_proj", "v_proj"],
}


@pytest.mark.parametrize("why", DEAD)
@pytest.mark.parametrize(
    "spec",
    [
        "kvquant-4bit-1%:group=8",
        "kvquant-4bit-5%:group=8,scales=offline,weighting=fisher,per=matrix",
        "kvquant-4bit:group=8,scales=online,weighting=none",
        "oscar-2bit:group=8",
        "kvtc-2bit:group=8,span=3",
        "tc-2bit:group=16",
        "tc-2bit:group=16,basis=keys-first",
        "tc-2bit:group=32,classes=2",
        "tc-3bit:group=16,metric=identity",
        "tc-cl-2bit:group=16",
        "tc-cl-2bit:group=16,span=3,basis=head",
        "tc-cl-2bit:group=32,classes=2",
    ],
)
@torch.no_grad()
def test_a_layer_that_tells_nothing_leaves_the_others_as_they_are(spec: str, why: str) -> None:
    model = tiny("llama")
    for name in DEAD[why]:
        getattr(model.model.layers[1].self_attn, name).weight.zero_()
    ids, method = prompt(1, 96), parse_method(spec)
    calibration = calibrate_on(model, prompt(8, 192), method)
    assert all(tensor.isfinite().all() for tensor in calibration.tensors.values())
    cache = KVCache(model, method, calibration=calibration)
    model(ids[:, :80], past_key_values=cache)
    read = model(ids[:, 80:], past_key_values=cache).logits
    whole = model(ids).logits[:, 80:]
    assert read.isfinite().all()
    assert (read - whole).norm() < (whole - whole.mean(1, keepdim=True)).norm()

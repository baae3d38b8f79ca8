"""KVTC's calibrator against small independent computations."""

import pytest
import torch
from torch import Tensor

from support.models import prompt, tiny
from xquant import KVCache, attach
from xquant.calibrators.kvtc import components, errors
from xquant.calibrators.run import calibrate_on
from xquant.methods.kvtc import choices
from xquant.quant.affine import dequantize, quantize


def rows(count: int = 300, width: int = 40) -> Tensor:
    random = torch.Generator().manual_seed(5)
    mixed = torch.randn(count, width, generator=random) * torch.logspace(1, -2, width)
    return mixed @ torch.linalg.qr(torch.randn(width, width, generator=random)).Q + 3


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    x = rows()
    mean, basis, _ = components(x)
    torch.testing.assert_close(mean, x.mean(0))
    _, sizes, vectors = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    assert sizes[0] > 10 * sizes[-1]
    alike = (basis.float() * vectors).sum(1).abs()
    torch.testing.assert_close(alike, torch.ones(40), atol=1e-2, rtol=0)


def test_what_each_group_loses_is_what_quantizing_it_loses() -> None:
    x = rows(50)
    found = dict(zip(choices(40), errors(x).tolist(), strict=True))
    for start, size, bits in choices(40):
        part = x[:, start : start + size]
        lost = part
        if bits:
            coded = quantize(part, bits, -1, size)
            lost = part - dequantize(*coded, -1, size, torch.empty_like(part))
        assert found[start, size, bits] == pytest.approx(float(lost.square().sum() / 50), rel=1e-4)
    assert {size for _, size, _ in found} == {16, 8}


def test_layers_of_a_span_share_components_of_its_keys_and_of_its_values() -> None:
    model, ids = tiny("llama"), prompt(3, 64)
    views = attach(model).view.compressed
    made = calibrate_on(model, ids, "kvtc-2bit:span=2").tensors
    for start in range(0, len(views), 2):
        span = range(start, min(start + 2, len(views)))
        for kind in ("key", "value"):
            basis = torch.cat([made[f"{i}.{kind}.basis"] for i in span], 1).float()
            torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), atol=5e-3, rtol=0)
            assert f"{start}.{kind}.error" in made and f"{start + 1}.{kind}.error" not in made
    # A token's mean is of keys before RoPE and of values.
    cache = KVCache(model, "int16:rope=pre,group=8,sink=4")
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    held = cache.compressed[1].stream.read(torch.float32, 64)[:, 4:]
    torch.testing.assert_close(made["1.mean"], held.flatten(0, 1).mean(0), atol=1e-3, rtol=1e-3)


def test_samples_of_sinks_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="samples of 4 tokens are all sinks: give 5 or more"):
        calibrate_on(tiny("llama"), prompt(3, 4), "kvtc-2bit")

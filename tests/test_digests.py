"""Digests tell tensors apart by their bits, alike on every device."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from xquant import digests


def changed(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors that differ in little, some in a way that sums would miss."""
    rows = tensor.clone()
    rows[[0, 1]] = rows[[1, 0]]
    yield rows
    yield tensor.flip(1)
    yield tensor.T.contiguous().view(tensor.shape)
    yield tensor.flatten().view(tensor.shape[1], -1)
    for place in ((0, 0), (-1, -1), (7, 3)):
        one = tensor.clone()
        one[place] += 1
        yield one
    for columns in ([1], [3], [1, 3], [3, 7]):
        negated = tensor.clone()
        negated[:, columns] *= -1
        yield negated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(9, 13), (64, 1600)])
def test_digests_tell_tensors_apart(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 20).to(dtype)
    others = list(changed(tensor))
    found = {digests.digest(each) for each in (tensor, *others)}
    assert len(found) == 1 + len(others)
    assert digests.digest(tensor.T.contiguous().T) == digests.digest(tensor)
    assert digests.digest(torch.cat([tensor, tensor])[1:][:0]) != digests.digest(tensor)
    held = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(shape)  # not at a whole word
    assert digests.digest(held) == digests.digest(tensor)


def test_devices_sum_as_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(-(2**62), 2**62, (5, digests.ROW))
    factors = digests._factors(rows.device)
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(digests, "_factors", lambda _: factors)
    fake: Any = SimpleNamespace(device=device, shape=rows.shape, split=rows.split)
    assert torch.equal(torch.cat(digests._sums(fake)), torch.cat(digests._sums(rows)))

"""Blocks in host memory: the same results, with two layers' blocks on the device at a time.

No device is needed: the host stands in for one, so that what is tested is what is copied, when, and read.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration
from support.generation import beams, greedy
from support.models import left_padded, prompt, tiny
from support.saved_caches import SOME
from xquant import KVCache
from xquant.cache import growing
from xquant.past import offload


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stands in for a device."""
    monkeypatch.setattr(growing, "is_host", lambda device: False)


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.inference_mode(False):
        return tiny("llama")


def caches(model: Any, spec: str, kernel: str = "auto") -> list[KVCache]:
    made = calibration(model, spec)
    return [KVCache(model, spec, calibration=made, kernel=kernel, offload=where) for where in (None, "cpu")]


@torch.inference_mode()
def go_on(cache: KVCache, seed: int = 0) -> Tensor:
    model, batch = cache.attachment.view.model, max(cache.index.batch, 2)
    parts = [prompt(batch, n, seed=seed + n) for n in (30, 1, 7, 1, 40, 1)]
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


def copies(cache: KVCache) -> int:
    assert cache.stack.offloader is not None
    return cache.stack.offloader.copied


@pytest.mark.parametrize("spec", [*SOME, "full:group=8", "xquant-16bit:group=8,form=mha"])
def test_every_method_gives_the_same(device: None, model: Any, spec: str) -> None:
    plain, far = caches(model, spec)
    assert torch.equal(go_on(plain), go_on(far))
    assert copies(far) <= 2 + (far.compressed[0].codec.span > 1)
    for cache in (plain, far):
        cache.crop(-11)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 0]))
    assert torch.equal(go_on(plain, 3), go_on(far, 3))
    for cache in (plain, far):
        cache.reset()
    assert torch.equal(go_on(plain, 4), go_on(far, 4))
    held = far.report()
    assert held.host_bytes == sum(held.sealed_bytes.values()) and not plain.report().host_bytes
    assert held.cache_bytes == plain.report().cache_bytes


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32,sink=1", "tc-2bit:group=32"])
def test_kernels_follow_blocks_that_move(device: None, spec: str) -> None:
    model = tiny("llama", head_dim=32)
    plain, far = caches(model, spec)
    assert far.kernel == plain.kernel and "reference" not in far.kernel.split(",")[0]
    assert torch.equal(go_on(plain), go_on(far))


@pytest.mark.parametrize("operation", [greedy, beams], ids=lambda o: o.__name__)
def test_generate(device: None, model: Any, operation: Any) -> None:
    plain, far = caches(model, "kivi-2bit:group=8,sink=2")
    assert torch.equal(operation(model, lambda: far), operation(model, lambda: plain))


def test_a_layer_is_sent_for_while_the_one_before_computes(
    device: None, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, far = caches(model, "kivi-4bit:group=8")
    go_on(far)
    with torch.inference_mode():
        model(prompt(2, 1), past_key_values=far)  # what was sealed last is sent for anew
    places = {layer.stream: at for at, layer in enumerate(far.compressed)}
    seen: list[str] = []
    fetch, enter = offload.Offloader._fetch, offload.Offloader.enter

    def noted_fetch(self: offload.Offloader, stream: Any) -> None:
        seen.append(f"fetch {places[stream]}")
        fetch(self, stream)
        assert self.copied <= 2

    def noted_enter(self: offload.Offloader, place: int) -> None:
        seen.append(f"layer {place}")
        enter(self, place)

    monkeypatch.setattr(offload.Offloader, "_fetch", noted_fetch)
    monkeypatch.setattr(offload.Offloader, "enter", noted_enter)
    with torch.inference_mode():
        model(prompt(2, 1), past_key_values=far)
    # The last layer of a step sends for the first of the next.
    ahead = [each for at in range(5) for each in (f"layer {at}", f"fetch {(at + 1) % 5}")]
    assert seen == ahead


def test_copies_saves_and_conversions(device: None, model: Any, tmp_path: Path) -> None:
    plain, far = caches(model, "kivi-4bit:group=8,sink=2")
    go_on(plain), go_on(far)
    twin = copy.deepcopy(far)
    assert twin.stack.offloader is not None and twin.stack.offloader is not far.stack.offloader
    far.save(tmp_path / "c")
    loaded = KVCache.load(model, tmp_path / "c", offload="cpu")
    converted = far.converted("int8:group=8")
    assert converted.stack.offloader is not None
    want = go_on(plain, 9)
    assert all(torch.equal(go_on(cache, 9), want) for cache in (twin, loaded, far))
    other = caches(model, "kivi-4bit:group=8,sink=2")[0]
    go_on(other)
    assert torch.equal(go_on(converted, 9), go_on(other.converted("int8:group=8"), 9))


def test_a_failed_pass_leaves_all_as_it_was(device: None, model: Any) -> None:
    plain, far = caches(model, "tc-cl-2bit:group=16")
    batch = left_padded([30, 12])
    for cache in (plain, far):
        with torch.inference_mode():
            model(**batch, past_key_values=cache)
        handle = model.model.layers[3].register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError):
            model(prompt(2, 20), past_key_values=cache)
        handle.remove()
    assert torch.equal(go_on(plain), go_on(far))


def _fail(*_: Any) -> None:
    raise RuntimeError


def test_what_cannot_be_offloaded_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="offload=cpu needs a model on a device"):
        KVCache(model, "kivi-4bit", offload="cpu")
    with pytest.raises(ValueError, match="offload is None or 'cpu', not 'disk'"):
        KVCache(model, "kivi-4bit", offload="disk")

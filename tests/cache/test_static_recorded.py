"""Steps that can be recorded: compiled once, with the same launches at the same addresses in every step."""

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from support.attention_cases import DEVICE
from support.host_waits import Launches, Silent
from support.models import left_padded, prompt, tiny
from xquant import StaticKVCache
from xquant.kernels.cpu import library as native

SPEC, ROOM = "kivi-4bit:group=32,sink=2", 256


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=64, initializer_range=0.1, num_hidden_layers=3)


@pytest.fixture(autouse=True)
def from_scratch() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@torch.no_grad()
def decoded(model: Any, cache: StaticKVCache, ids: Tensor, settled: int | None = None) -> Tensor:
    """Logits of a prompt of 60 tokens and of steps; after ``settled`` tokens nothing may be compiled anew."""
    found = [model(ids[:, :60], past_key_values=cache).logits.clone()]
    for at in range(60, ids.shape[1]):
        with torch._dynamo.config.patch(error_on_recompile=settled is not None and at >= settled):
            # A graph that is recorded gives its memory to the next step.
            found.append(model(ids[:, at : at + 1], past_key_values=cache).logits.clone())
    return torch.cat(found, 1)


@pytest.mark.skipif(not native.isas(), reason="no native library, and pages are not read in place")
@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_all_steps_are_one_graph_of_one_shape(model: Any, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    ids = prompt(2, 110)
    wanted = decoded(model, StaticKVCache(model, SPEC, ROOM), ids)
    fast = torch.compile(model, backend=backend, dynamic=False)
    found = decoded(fast, StaticKVCache(model, SPEC, ROOM), ids, settled=62)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=0)
    # A prompt and a step, of the decoder and what follows it each.
    assert counters["stats"]["unique_graphs"] == 4
    again = decoded(fast, StaticKVCache(model, SPEC, ROOM), ids, settled=0)
    assert torch.equal(again, found)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="XQUANT_TEST_DEVICE is not cuda")
def test_a_graph_that_was_recorded_holds_for_other_steps_and_caches() -> None:
    model = tiny("llama", head_dim=32, hidden_size=64, num_hidden_layers=3).to(DEVICE)
    fast = torch.compile(model, mode="reduce-overhead", dynamic=False)
    for seed in (1, 2):
        ids = prompt(2, 110, seed=seed).to(DEVICE)
        found, wanted = (
            decoded(each, StaticKVCache(model, SPEC, ROOM, kernel="triton"), ids) for each in (fast, model)
        )
        assert (found - wanted).norm() < 2e-2 * wanted.norm()


@pytest.mark.long
def test_generate_compiled_with_padding(model: Any) -> None:
    """The mask grows from step to step, and no step is compiled anew for it."""
    inputs = left_padded([64, 40])
    asked = {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(**inputs, past_key_values=StaticKVCache(model, SPEC, ROOM), **asked)
    fast = copy.deepcopy(model)
    fast.forward = torch.compile(fast.forward, backend="eager")
    for settled in (False, True):
        cache = StaticKVCache(fast, SPEC, ROOM)
        with torch._dynamo.config.patch(error_on_recompile=settled):
            found = fast.generate(**inputs, past_key_values=cache, **asked)
        assert torch.equal(found, wanted)


def test_the_graph_may_be_recorded(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """By the compiler, which records what is between hooks; not together with them."""
    if hasattr(torch.Tag, "cudagraph_unsafe"):
        tags = torch.ops.xquant.attend_in_place.default.tags
        assert torch.Tag.cudagraph_unsafe not in tags
    cache = StaticKVCache(model, SPEC, ROOM)
    decoded(model, cache, prompt(1, 62))
    with torch.no_grad():
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="cannot be recorded in a CUDA graph"):
            model(prompt(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 62


def test_no_two_caches_have_one_mark(model: Any) -> None:
    """Nor one cache for two memories. An address that was freed would come back."""
    marks, ids = set(), prompt(2, 70)
    with torch.no_grad():
        for _ in range(5):
            cache = StaticKVCache(model, SPEC, ROOM)
            for rows in (1, 2):
                decoded(model, cache, ids[:rows])
                marks.add(cache._mark.data_ptr())
                cache.reset()
            decoded(model, cache, ids)
            marks.add(cache._mark.data_ptr())
            marks.add(copy.deepcopy(cache)._mark.data_ptr())
            del cache
    assert len(marks) == 15  # a batch of as many sequences as before keeps its memory


@pytest.mark.long
@torch.no_grad()
def test_every_step_launches_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a CUDA graph of one step holds for all; and the device is asked for nothing."""
    pytest.importorskip("triton", minversion="3.5")
    from support import triton_interpreter
    from xquant.kernels.triton import attention

    triton_interpreter.mend()
    model = tiny("llama", head_dim=32, hidden_size=64, initializer_range=0.1, num_hidden_layers=2)
    model, ids = model.to(DEVICE), prompt(2, 40).to(DEVICE)
    cache, plain = (StaticKVCache(model, SPEC, 64, kernel=k) for k in ("triton", "reference"))
    noted: list[Any] = []
    attend = StaticKVCache.attend

    def silent(self: StaticKVCache, index: int, call: Any) -> Tensor | None:
        with Silent():
            return attend(self, index, call)

    def run(of: StaticKVCache, start: int, end: int) -> Tensor:
        logits: Tensor = model(ids[:, start:end], past_key_values=of).logits
        return logits

    run(cache, 0, 30)
    assert cache.kernel.startswith("triton")
    wanted = run(plain, 0, 30)
    for name in ("attend", "combine", "append"):
        monkeypatch.setattr(attention, name, Launches(getattr(attention, name), noted))
    monkeypatch.setattr("xquant.cache.static.finite.asked_at_once", lambda device: False)
    monkeypatch.setattr(StaticKVCache, "attend", silent)
    first: list[Any] = []
    for at in range(30, 37):  # the first blocks are sealed on the way, with their sinks
        noted.clear()
        found, wanted = run(cache, at, at + 1), run(plain, at, at + 1)
        assert (found - wanted).norm() < 2e-2 * wanted.norm()
        first = first or list(noted)
        assert noted == first and len(noted) == 6

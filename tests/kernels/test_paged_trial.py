"""What `auto` takes on a GPU: pages are read by Triton where it reads them as torch does. Here the CPU is
taken for one, and Triton's kernels run in its interpreter."""

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from support import triton_interpreter
from support.attention_cases import DEVICE
from support.models import prompt, tiny
from xquant import StaticKVCache
from xquant.kernels.triton.attention import TritonPages

triton_interpreter.mend()

SPEC = "kivi-4bit:group=32,sink=2"
ATTEND = TritonPages.attend


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has tried nothing yet."""
    triton_interpreter.take_for_a_gpu(monkeypatch)


def made(spec: str = SPEC) -> tuple[Any, StaticKVCache, list[str]]:
    """A model, a cache, and which warnings there were."""
    model = tiny("llama", head_dim=32, hidden_size=64, num_hidden_layers=2).to(DEVICE)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cache = StaticKVCache(model, spec, 40)
    return model, cache, [str(w.message) for w in found if w.category is RuntimeWarning]


def test_pages_are_tried_once() -> None:
    calls: list[int] = []

    def counted(self: TritonPages, *args: Any) -> None:
        calls.append(1)
        ATTEND(self, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TritonPages, "attend", counted)
        for _ in range(2):
            _, cache, warned = made()
            assert cache.kernel == "triton (agrees with the reference)" and not warned
    assert calls == [1]  # both layers have one layout


@pytest.mark.parametrize("broken", ["wrong", "fails"])
def test_pages_that_are_not_read_right_are_decoded(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: TritonPages, *args: Any) -> None:
        if broken == "fails":
            raise RuntimeError("no such instruction")
        ATTEND(self, *args)
        args[-1].mul_(1.01)

    monkeypatch.setattr(TritonPages, "attend", attend)
    model, cache, warned = made()
    why = "no such instruction" if broken == "fails" else "differs from the reference"
    assert cache.kernel.startswith("reference (decodes the whole past") and why in cache.kernel
    assert len(warned) == 1 and "pages are read in torch, which is slower" in warned[0]
    ids = prompt(1, 40).to(DEVICE)
    with torch.no_grad():
        for end in (36, 37, 38):
            logits = model(ids[:, cache.get_seq_length() : end], past_key_values=cache).logits
    assert torch.isfinite(logits).all()

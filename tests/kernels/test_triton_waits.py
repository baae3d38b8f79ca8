"""What the host asks the device for in a decode step: nothing, while no block is sealed."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from transformers import masking_utils

pytest.importorskip("triton", minversion="3.5")

from support import triton_interpreter
from support.attention_cases import DEVICE
from support.caches import make_cache
from support.host_waits import Silent, Unlaunched
from support.models import left_padded, prompt, tiny
from xquant import KVCache
from xquant.kernels.triton import accumulate, attention, rebuild
from xquant.past import finite

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()

by_eager = pytest.mark.skipif(
    "torch.tensor(" in inspect.getsource(masking_utils.eager_mask),
    reason="the eager mask of this transformers is copied to the device",
)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are taken to be on a GPU."""
    monkeypatch.setattr(finite, "asked_at_once", lambda device: False)


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, kernel, out in (
        (attention, "attend", "sums_out"),
        (attention, "combine", "out"),
        (rebuild, "attend_exact", "sums_out"),
        (rebuild, "rebuild", "scores_out"),
        (rebuild, "sum_states", "sums_out"),
        (rebuild, "combine", "out"),
        (accumulate, "accumulate", "sums"),
    ):
        monkeypatch.setattr(module, kernel, Unlaunched(getattr(module, kernel), out))


@pytest.mark.parametrize(
    "spec",
    [
        "kivi-4bit:group=32,sink=2",
        "kvquant-3bit:group=32,rope=post",
        "xquant-4bit:group=32,sink=2",
        "xquant-cl-2bit:group=32,first_layers=1,sink=2",
    ],
)
@pytest.mark.parametrize(
    ("family", "implementation", "pads"),
    [
        ("llama", "sdpa", False),
        pytest.param("qwen2", "eager", True, marks=by_eager),
        pytest.param("gemma2", "eager", True, marks=by_eager),  # some layers are not ours
    ],
)
@torch.inference_mode()
def test_a_decode_step_asks_for_nothing_while_no_block_is_sealed(
    family: str,
    implementation: str,
    pads: bool,
    spec: str,
    elsewhere: None,
    unlaunched: None,
) -> None:
    """The whole forward pass, transformers' part too, which with sdpa asks whether a mask pads."""
    with torch.inference_mode(False):
        model = tiny(family, head_dim=32, hidden_size=128, initializer_range=0.05)
        model = model.to(DEVICE)
        model.set_attn_implementation(implementation)
        cache = make_cache(model, spec, kernel="triton")
    batch = {name: given.to(DEVICE) for name, given in left_padded([40, 21]).items()}
    mask = batch["attention_mask"]
    model(batch["input_ids"], attention_mask=mask if pads else None, past_key_values=cache)
    for step in range(3):  # the first after a block was sealed makes the tables of it
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        ids = prompt(2, 1, seed=step).to(DEVICE)
        workspace = cache.stack.shared.workspace.take(ids.device, 1, 1)[0].data_ptr()
        with Silent() if step else nullcontext():
            model(ids, attention_mask=mask if pads else None, past_key_values=cache)
        after = cache.stack.shared.workspace.take(ids.device, 1, 1)[0].data_ptr()
        assert not step or after == workspace
    assert {layer.stream.tokens for layer in cache.compressed} == {32}


@torch.inference_mode()
def test_what_asks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it: with rows asked about at once, as on a CPU."""
    monkeypatch.setattr(finite, "asked_at_once", lambda device: True)
    model = tiny("llama", head_dim=32, hidden_size=128, initializer_range=0.05).to(DEVICE)
    cache = KVCache(model, "kivi-4bit:group=32", kernel="triton")
    model(prompt(1, 3).to(DEVICE), past_key_values=cache)
    with pytest.raises(AssertionError, match="waits for the device"), Silent():
        model(prompt(1, 1).to(DEVICE), past_key_values=cache)

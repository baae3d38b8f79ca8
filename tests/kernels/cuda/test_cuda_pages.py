"""The CUDA kernel over an engine's pages, on the CPU, against exact attention over what they decode to."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cuda.emulation import emulate, needs_a_compiler
from support.attention_cases import DEVICE
from support.engine_memory import BLOCK, Asked, Memory, One, asked, check_own_reads, codec_of, new_states
from support.models import left_padded, prompt, tiny
from xquant import StaticKVCache
from xquant.kernels.cuda import BACKEND

pytestmark = [needs_a_compiler, pytest.mark.cases(1)]
SPECS = [
    "int4:group=32",
    "int4:group=32,keys=channel,rope=pre",
    "int2:group=32,keys=channel",
    "int8:group=32,keys=channel,rope=pre",
]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            emulate(patch)
        yield


@pytest.mark.long
@settings(deadline=None, max_examples=12, phases=(Phase.explicit, Phase.generate), derandomize=True)
@given(
    spec=st.sampled_from(SPECS),
    heads=st.sampled_from([(64, 2, 2), (128, 1, 3)]),
    what=asked,
)
def test_any_sequences_read_their_own(spec: str, heads: tuple[int, int, int], what: Asked) -> None:
    codec = codec_of(spec, *heads)
    assert not BACKEND.unfit(codec, BLOCK)
    check_own_reads(BACKEND, codec, what)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["kivi-4bit:group=64,sink=2", "int4:group=32"])
def test_a_static_cache_decodes_as_in_torch(spec: str) -> None:
    model: Any = tiny("llama", head_dim=64, hidden_size=64, num_hidden_layers=2).to(DEVICE)
    found = [decoded(model, spec, kernel, steps=70) for kernel in ("cuda", "reference")]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    assert max(errors[:50]) < 5e-3
    assert max(errors) < 0.1  # a block was sealed, in which some codes are others


def decoded(model: Any, spec: str, kernel: str, steps: int) -> list[Tensor]:
    """The logits of steps behind padded prompts."""
    cache = StaticKVCache(model, spec, 200, kernel=kernel)
    batch = {name: given.to(DEVICE) for name, given in left_padded([70, 41]).items()}
    mask, found = batch["attention_mask"], []
    with torch.no_grad():
        model(batch["input_ids"], attention_mask=mask, past_key_values=cache)
        for step in range(steps):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            ids = prompt(2, 1, seed=step).to(DEVICE)
            found.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    return found


def test_calls_allocate_no_counters() -> None:
    """A CUDA graph would keep them in memory that it gives away."""
    codec = codec_of("int4:group=32", 64, 2, 2)
    memory = Memory(BACKEND, codec, 44, 0)
    reader: Any = memory.reader()
    counters = reader._packed._arrived
    of = memory.sequences([One(40, 3, 0, 0), One(32, 1, 0, 0)], 16, columns=3)
    states = new_states(codec.view, 1 + 2 * 16 * 2)
    reader.attend(memory.call(states), of, torch.empty_like(states[0]))
    assert reader._packed._arrived is counters and not counters.any()

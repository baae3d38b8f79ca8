"""The CUDA kernel over an engine's pages, on the CPU, against exact attention over what they decode to."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cuda.emulation import emulate, needs_a_compiler
from kernels.test_triton_pages import BLOCK, Memory, One, codec_of, new_states, sequences
from support.attention_cases import DEVICE, TOLERANCE
from support.models import left_padded, prompt, tiny
from xquant import StaticKVCache
from xquant.kernels.cuda import BACKEND
from xquant.kernels.paged import PagedAttention

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


class CudaMemory(Memory):
    def reader(self) -> PagedAttention:
        angles = self.angles.paged(BLOCK)
        assert not BACKEND.unfit(self.codec, BLOCK)
        found = BACKEND.paged(self.codec, self.layout, angles)
        assert found is not None
        found.bind(self.memory, self.rings, self.slots)
        return found


@pytest.mark.long
@settings(deadline=None, max_examples=12, phases=(Phase.explicit, Phase.generate), derandomize=True)
@given(
    spec=st.sampled_from(SPECS),
    heads=st.sampled_from([(64, 2, 2), (128, 1, 3)]),
    ones=st.lists(sequences, min_size=1, max_size=3),
    sink=st.sampled_from([0, 1, 3]),
    queries=st.integers(1, 4),
    columns=st.integers(3, 40),
    beside=st.integers(0, 3),
    softcap=st.sampled_from([0.0, 4.0]),
    idle=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_sequences_read_their_own(
    spec: str,
    heads: tuple[int, int, int],
    ones: list[One],
    sink: int,
    queries: int,
    columns: int,
    beside: int,
    softcap: float,
    idle: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    codec = codec_of(spec, *heads)
    memory = CudaMemory(codec, 40 + queries, sink, beside)
    ones = [One(o.limit, o.held, o.first, sink if o.limit >= BLOCK else 0) for o in ones]
    if idle:
        ones.append(One(0, 0, 0, 0, idle=True))
    of = memory.sequences(ones, queries, columns)
    states = new_states(codec.view, 1 + 2 * queries * len(ones))
    out = torch.full(states[0].shape, 7.0, device=DEVICE)
    rings = memory.rings.clone()
    wanted = [memory.expected(b, one, states, of, softcap) for b, one in enumerate(ones)]

    memory.reader().attend(memory.call(states, softcap), of, out)

    nobodys = torch.ones(len(out), dtype=torch.bool)
    for b, one in enumerate(ones):
        start = int(of.first[b])
        own, found = slice(start, start + queries), out[start : start + queries].double()
        nobodys[own] = False
        if one.idle:
            assert not found.any()
            continue
        assert (found - wanted[b]).norm() < TOLERANCE * wanted[b].norm()
        places = (one.first + one.held + torch.arange(queries)) % memory.capacity
        rows = torch.cat([t[own].flatten(1) for t in states[1:]], -1)
        rings[int(of.held[b, 0]), places.to(DEVICE)] = rows
    assert (out[nobodys.to(DEVICE)] == 7).all()
    assert torch.equal(memory.rings, rings)


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
    memory = CudaMemory(codec, 44, 0)
    reader: Any = memory.reader()
    counters = reader._packed._arrived
    of = memory.sequences([One(40, 3, 0, 0), One(32, 1, 0, 0)], 16, columns=3)
    states = new_states(codec.view, 1 + 2 * 16 * 2)
    reader.attend(memory.call(states), of, torch.empty_like(states[0]))
    assert reader._packed._arrived is counters and not counters.any()

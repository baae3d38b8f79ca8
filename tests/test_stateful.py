"""Random sequences of everything that is done with a cache: 16-bit codes against transformers' own cache, low
bits by the native kernels against the reference.

XQUANT_EXAMPLES=2000 runs as many of each kind; by default there are few, the same every time.
"""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn
from transformers import DynamicCache

from models import VOCABULARY, tiny
from operations import remove
from xquant import KVCache

WANTED = os.environ.get("XQUANT_EXAMPLES")
PHASES = [phase for phase in Phase if phase is not Phase.shrink or not WANTED]
EXAMPLES = settings(
    phases=PHASES,
    max_examples=int(WANTED or 12),
    stateful_step_count=12,
    derandomize=WANTED is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
IDENTITY = [
    "full:group=8",
    "kivi-16bit:group=8,sink=2",
    "kivi-16bit:group=8,rope=post,tail=5",
    "crosslayer:high=16,low=16,group=8,tail=0",
    "kvquant-16bit:group=8",
    "xquant-16bit:group=8,form=mha",
    "xquant-16bit:group=8,form=gqa,sink=2",
    "xquant-cl-16bit:group=8,form=gqa,first_bits=16,tail=3",
    "xquant-cl-16bit:group=8,form=mha,first_bits=16",
]
STATES = [spec for spec in IDENTITY if not spec.startswith("xquant")]
"""What a cache can be converted to."""
LOSSY = [
    "kivi-8bit:group=32,sink=2",
    "kivi-8bit:group=32,rope=post,tail=5",
    "int8-gs32:group=32,values=token,rope=pre",
    "xquant-8bit:group=32,form=gqa",
    "xquant-8bit:group=32,form=mha,rotate=true",
]
FAMILIES = ["llama", "qwen2", "gemma3"]
MODELS: dict[tuple[str, bool], Any] = {}
MOST_TOKENS, MOST_SEQUENCES = 160, 4


def model_of(family: str, wide: bool) -> Any:
    if (family, wide) not in MODELS:
        # Weights that do not blow up what rounding leaves.
        more = {"head_dim": 32, "hidden_size": 64, "initializer_range": 0.05} if wide else {}
        MODELS[family, wide] = tiny(family, **more)
    return MODELS[family, wide]


class Machine(RuleBasedStateMachine):
    """Two caches of one model that are to give the same logits."""

    ours: KVCache
    theirs: Any
    model: Any
    tolerance: float
    fresh: Callable[["Machine"], Any]
    """Makes an empty cache to compare with."""

    def begin(self, pads: list[int], length: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.start(len(pads), pads, length)

    def start(self, batch: int, pads: list[int], length: int) -> None:
        """The first forward pass, of prompts that are padded on the left."""
        real = torch.arange(length)[None] >= torch.tensor((pads * batch)[:batch])[:, None]
        self.mask = real.long()
        self.compare(self.ids(batch, length))

    def ids(self, batch: int, length: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (batch, length), generator=self.generator)

    @property
    def batch(self) -> int:
        return len(self.mask)

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @torch.inference_mode()
    def logits(self, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        logits: Tensor = self.model(ids, **given).logits
        return logits

    def compare(self, ids: Tensor) -> None:
        got, want = (self.logits(cache, ids, self.mask) for cache in (self.ours, self.theirs))
        seen = self.mask[:, -ids.shape[1] :].bool()
        error = (got - want)[seen].norm() / want[seen].norm()
        assert error < self.tolerance, f"off by {float(error):.2g}"
        lengths = {layer.get_seq_length() for layer in self.ours.compressed}
        assert lengths == {self.ours.get_seq_length(), self.ours.index.length} == {self.length}

    def add(self, count: int) -> Tensor:
        self.mask = torch.nn.functional.pad(self.mask, (0, count), value=1)
        return self.ids(self.batch, count)

    def room(self, count: int) -> bool:
        return self.length + count <= MOST_TOKENS

    @rule(count=st.integers(2, 40))
    def forward(self, count: int) -> None:
        if self.room(count):
            self.compare(self.add(count))

    @rule(count=st.integers(1, 6))
    def decode(self, count: int) -> None:
        for _ in range(count):
            if self.room(1):
                self.compare(self.add(1))

    @rule(count=st.integers(1, 50))
    def crop(self, count: int) -> None:
        sliding = any(getattr(layer, "is_sliding", False) for layer in self.ours.layers)
        if count < self.length - int((self.mask == 0).sum(1).max()) and not sliding:
            self.mask = self.mask[:, :-count]
            for cache in (self.ours, self.theirs):
                remove(cache, count)

    @rule(order=st.lists(st.integers(0, MOST_SEQUENCES - 1), min_size=1, max_size=MOST_SEQUENCES))
    def select(self, order: list[int]) -> None:
        indices = torch.tensor([i % self.batch for i in order])
        self.mask = self.mask[indices]
        for cache in (self.ours, self.theirs):
            cache.batch_select_indices(indices)

    @rule(order=st.permutations(range(MOST_SEQUENCES)))
    def reorder(self, order: list[int]) -> None:
        indices = torch.tensor([i for i in order if i < self.batch])
        self.mask = self.mask[indices]
        for cache in (self.ours, self.theirs):
            cache.reorder_cache(indices)

    @precondition(lambda self: self.batch <= MOST_SEQUENCES // 2)
    @rule()
    def repeat(self) -> None:
        self.mask = self.mask.repeat_interleave(2, 0)
        for cache in (self.ours, self.theirs):
            cache.batch_repeat_interleave(2)

    @rule(pads=st.lists(st.integers(0, 9), min_size=1, max_size=3), length=st.integers(10, 40))
    def reset(self, pads: list[int], length: int) -> None:
        self.ours.reset()
        self.theirs = self.fresh()
        self.start(len(pads), pads, length)

    @rule(count=st.integers(1, 20))
    def go_on_with_a_copy(self, count: int) -> None:
        """What is done with one of both leaves the other as it is."""
        other = copy.deepcopy(self.ours)
        mask = torch.nn.functional.pad(self.mask, (0, count), value=1)
        self.logits(other, self.ids(self.batch, count), mask)
        self.ours, other = copy.deepcopy(self.ours), self.ours
        other.reset()

    @rule()
    def go_on_from_a_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "cache"
            self.ours.save(file)
            self.ours = KVCache.load(self.model, file)

    @rule(
        count=st.integers(1, 30),
        layer=st.integers(0, 5),
        part=st.sampled_from(["self_attn", "mlp", "input_layernorm"]),
        kind=st.sampled_from(["error", "interruption", "NaN"]),
    )
    def fail(self, count: int, layer: int, part: str, kind: str) -> None:
        """A forward pass of the cache ends early; then it is as if it had not been."""
        layers = self.model.model.layers
        module = self.model.lm_head if layer >= len(layers) else getattr(layers[layer], part)
        if kind == "NaN":
            if layer + 1 >= len(layers) or not self.above(layer):
                return  # nothing above keeps it
            module = layers[layer].mlp

        def poison(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * torch.nan

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt if kind == "interruption" else RuntimeError("no")

        handle = (
            module.register_forward_hook(poison)
            if kind == "NaN"
            else module.register_forward_pre_hook(stop)
        )
        mask = torch.nn.functional.pad(self.mask, (0, count), value=1)
        try:
            self.logits(self.ours, self.ids(self.batch, count), mask)
        except (KeyboardInterrupt, RuntimeError, ValueError):
            pass
        else:
            raise AssertionError("it did not fail")
        finally:
            handle.remove()
        # What follows the decoder is not undone where it is interrupted: the tokens are there.
        kept = kind == "interruption" and module is self.model.lm_head
        if kept:
            remove(self.ours, count) if not self.sliding else self.ours.reset()
        if kept and self.sliding:
            self.theirs = self.fresh()
            self.start(self.batch, [0], 12)

    @property
    def sliding(self) -> bool:
        return any(getattr(layer, "is_sliding", False) for layer in self.ours.layers)

    def above(self, layer: int) -> bool:
        return any(own.codec.view.index > layer for own in self.ours.compressed)


BEGINNINGS: dict[str, Any] = {
    "family": st.sampled_from(FAMILIES),
    "pads": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "length": st.integers(10, 40),
    "seed": st.integers(0, 99),
}


class AgainstTransformers(Machine):
    tolerance = 2e-4

    @initialize(spec=st.sampled_from(IDENTITY), **BEGINNINGS)
    def make(self, spec: str, family: str, **prompts: Any) -> None:
        self.model = model_of(family, wide=False)
        self.ours, self.theirs = KVCache(self.model, spec), self.fresh()
        self.begin(**prompts)

    def fresh(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @rule(spec=st.sampled_from(STATES))
    def convert(self, spec: str) -> None:
        self.ours = self.ours.converted(spec)


class NativeAgainstReference(Machine):
    tolerance = 1e-2

    @initialize(spec=st.sampled_from(LOSSY), **BEGINNINGS)
    def make(self, spec: str, family: str, **prompts: Any) -> None:
        self.model, self.spec = model_of(family, wide=True), spec
        self.ours, self.theirs = KVCache(self.model, spec), self.fresh()
        self.begin(**prompts)

    def fresh(self) -> KVCache:
        return KVCache(self.model, self.spec, kernel="reference")


for machine in (AgainstTransformers, NativeAgainstReference):
    machine.TestCase.settings = EXAMPLES
TestAgainstTransformers = AgainstTransformers.TestCase
TestNativeAgainstReference = NativeAgainstReference.TestCase

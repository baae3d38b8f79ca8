"""Random sequences of everything that is done with a cache, in every form that it takes: 16-bit codes against
transformers' own cache, low bits by the native kernels against the reference.

XQUANT_EXAMPLES=2000 runs as many of each kind; by default there are few, the same every time.
"""

import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, rule
from torch import Tensor
from transformers import DynamicCache

from support.generation import remove
from support.models import tiny
from support.saved_caches import through_file
from xquant import KVCache, PrefixStore, StaticKVCache, compressed

from .machine import MOST_SEQUENCES, MOST_TOKENS, RECURRENT, Machine

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
STATIC = [
    "kivi-16bit:group=32,tail=32",
    "kivi-16bit:group=32,rope=post,sink=3",
    "int16:group=32",
    "xquant-16bit:group=32,form=gqa",
]
FAMILIES = ["llama", "qwen2", "gemma3"]
EVERY_FAMILY = [
    *FAMILIES, *RECURRENT, "llama-mha", "mistral", "qwen3", "gemma2", "phi3", "cohere2", "glm4", "gpt2",
    "gpt_neox", "falcon", "olmo3", "gemma4",
]  # fmt: skip
"""Without experts: which of them a token goes to may turn on a rounding."""
MODELS: dict[tuple[str, bool], Any] = {}


def model_of(family: str, wide: bool) -> Any:
    if (family, wide) not in MODELS:
        # Weights that do not blow up what rounding leaves.
        more = {} if family in FAMILIES and not wide else {"initializer_range": 0.05}
        wider = {"head_dim": 32, "hidden_size": 64} if wide else {}
        MODELS[family, wide] = tiny(family, **wider, **more)
    return MODELS[family, wide]


class Growing(Machine):
    """What a `KVCache` does that a static one does not."""

    @rule()
    def go_on_from_a_file(self) -> None:
        self.ours = through_file(self.ours)

    @rule(length=st.integers(140, 150))
    def go_on_from_a_store(self, length: int) -> None:
        """A new text, of which a prefix is stored and found."""
        self.reset([0], length)
        with tempfile.TemporaryDirectory() as folder:
            store = PrefixStore(folder, self.model, self.spec)
            (stored,) = store.put(self.ours, self.known)
            found = store.get(torch.cat([self.known, self.ids(1, 1)], 1))
        whole = len(list(self.ours.compressed)) == len(self.ours.layers) and not self.ours.linear_states
        assert found is not None and found.get_seq_length() == stored
        assert stored == (length // store.chunk * store.chunk if whole else length)
        self.ours = found
        if stored < length:
            with torch.inference_mode():
                self.logits(self.ours, self.known[:, stored:], self.mask)

    @rule(length=st.integers(10, 40))
    def go_on_from_an_implicit_one(self, length: int) -> None:
        """A new text, whose first pass is given no cache."""
        self.theirs = self.fresh()
        self.mask, self.known = torch.ones(1, length, dtype=torch.long), self.ids(1, length)
        with compressed(self.model, self.spec), torch.inference_mode():
            self.ours = self.model(self.known, use_cache=True).past_key_values
        assert isinstance(self.ours, KVCache)
        self.logits(self.theirs, self.known, self.mask)


BEGINNINGS: dict[str, Any] = {
    "pads": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "length": st.integers(10, 40),
    "seed": st.integers(0, 99),
}


class AgainstTransformers(Growing):
    tolerance = 2e-4

    @initialize(spec=st.sampled_from(IDENTITY), family=st.sampled_from(EVERY_FAMILY), **BEGINNINGS)
    def make(self, spec: str, family: str, **prompts: Any) -> None:
        self.model, self.family, self.spec = model_of(family, wide=False), family, spec
        try:
            self.ours = KVCache(self.model, spec)
        except ValueError:  # the method needs what the family has not
            self.spec = IDENTITY[1]
            self.ours = KVCache(self.model, self.spec)
        self.theirs = self.fresh()
        self.begin(**prompts)

    def fresh(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @rule(spec=st.sampled_from(STATES))
    def convert(self, spec: str) -> None:
        try:
            self.ours, self.spec = self.ours.converted(spec), spec
        except ValueError:
            assert self.family not in FAMILIES


class NativeAgainstReference(Growing):
    tolerance = 1e-2

    @initialize(spec=st.sampled_from(LOSSY), family=st.sampled_from(FAMILIES), **BEGINNINGS)
    def make(self, spec: str, family: str, **prompts: Any) -> None:
        self.model, self.spec = model_of(family, wide=True), spec
        self.ours, self.theirs = KVCache(self.model, spec), self.fresh()
        self.begin(**prompts)

    def fresh(self) -> KVCache:
        return KVCache(self.model, self.spec, kernel="reference")


class StaticAgainstTransformers(Machine):
    """In a static cache, which refuses some of it."""

    tolerance = 2e-4
    most = 0
    """The most tokens that our cache was given since it was empty: so many that rings hold the end of."""

    @initialize(
        spec=st.sampled_from(STATIC),
        family=st.sampled_from(["llama", "llama-mha", "qwen2", "mistral", "qwen3", "phi3"]),
        wide=st.booleans(),
        **BEGINNINGS,
    )
    def make(self, spec: str, family: str, wide: bool, **prompts: Any) -> None:
        self.model, self.spec = model_of(family, wide), spec
        try:
            self.ours = StaticKVCache(self.model, spec, MOST_TOKENS)
        except ValueError:
            assert spec == STATIC[-1]  # from layer inputs it needs heads that are shared
            self.ours = StaticKVCache(self.model, STATIC[0], MOST_TOKENS)
        self.theirs = self.fresh()
        self.begin(**prompts)

    def fresh(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def start(self, *prompts: Any) -> None:
        self.most = 0
        super().start(*prompts)

    def logits(self, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
        most = max(self.most, mask.shape[1])
        if cache is self.ours and ids.shape[1] <= 16:  # rings have them even if the pass fails
            self.most = most
        logits = super().logits(cache, ids, mask)
        if cache is self.ours:
            self.most = most
        return logits

    def lengths(self) -> set[int]:
        return {layer.get_seq_length() for layer in self.ours.layers}

    @rule(count=st.integers(1, 50))
    def crop(self, count: int) -> None:
        if count >= self.length - int((self.mask == 0).sum(1).max()):
            return
        try:
            remove(self.ours, count)
        except ValueError as error:
            assert self.length - count < self.most - 16, "it goes back so far"
            assert re.fullmatch(rf"[^\n]* {self.most} [^\n]*use KVCache", str(error))
        else:
            self.mask, self.known = self.mask[:, :-count], self.known[:, :-count]
            remove(self.theirs, count)
        if self.room(1):
            self.compare(self.add(1))

    def take_back(self, count: int) -> None:
        if count > 16:
            self.reset([0], 12)
        else:
            remove(self.ours, count)

    def refused(self, change: Callable[[], Any]) -> None:
        """By one line, and nothing is changed."""
        with pytest.raises(ValueError, match=r"^[^\n]*use KVCache$"):
            change()
        self.compare(self.add(1))

    @rule(order=st.permutations(range(MOST_SEQUENCES)))
    def reorder(self, order: list[int]) -> None:
        if self.room(1):
            self.refused(lambda: self.ours.reorder_cache(torch.tensor(order[:1])))

    select = reorder

    @rule()
    def repeat(self) -> None:
        if self.room(1):
            self.refused(lambda: self.ours.batch_repeat_interleave(2))

    def above(self, layer: int) -> bool:
        return layer + 1 < len(self.ours.layers)


for machine in (AgainstTransformers, NativeAgainstReference, StaticAgainstTransformers):
    machine.TestCase.settings = EXAMPLES
TestAgainstTransformers = AgainstTransformers.TestCase
TestNativeAgainstReference = NativeAgainstReference.TestCase
TestStaticAgainstTransformers = StaticAgainstTransformers.TestCase

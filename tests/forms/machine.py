"""Everything that is done with a cache, as rules of a state machine that draws sequences of them."""

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor, nn

from support.generation import remove
from support.models import VOCABULARY

RECURRENT = ["qwen3_5", "falcon_h1"]
NOT_COMPILED = ["falcon", "gemma4"]
"""Whose layers attend by themselves, or lend their states to others: refused."""
COMPILED: dict[int, Any] = {}
MOST_TOKENS, MOST_SEQUENCES = 160, 4


class Machine(RuleBasedStateMachine):
    """Two caches of one model that are to give the same logits."""

    ours: Any
    theirs: Any
    model: Any
    tolerance: float
    fresh: Callable[["Machine"], Any]
    """Makes an empty cache to compare with."""
    new: Callable[["Machine"], Any]
    """Makes an empty one of ours."""
    family = "llama"
    run: Any = None
    """What is called with our cache in place of the model: a compiled one."""

    def begin(self, pads: list[int], length: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.start(len(pads), pads, length)

    def start(self, batch: int, pads: list[int], length: int) -> None:
        """The first forward pass, of prompts that are padded on the left."""
        pads = [0] if self.family in RECURRENT else pads
        real = torch.arange(length)[None] >= torch.tensor((pads * batch)[:batch])[:, None]
        self.mask = real.long()
        self.known = self.ids(batch, 0)
        self.compare(self.ids(batch, length))

    def ids(self, batch: int, length: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (batch, length), generator=self.generator)

    def keep(self, rows: Tensor) -> None:
        """These of the sequences go on."""
        self.mask, self.known = self.mask[rows], self.known[rows]

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
        run = self.run if cache is self.ours and self.run is not None else self.model
        logits: Tensor = run(ids, **given).logits
        return logits

    def compare(self, ids: Tensor) -> None:
        got, want = (self.logits(cache, ids, self.mask) for cache in (self.ours, self.theirs))
        seen = self.mask[:, -ids.shape[1] :].bool()
        error = (got - want)[seen].norm() / want[seen].norm()
        assert error < self.tolerance, f"off by {float(error):.2g}"
        self.known = torch.cat([self.known, ids], 1)
        assert self.lengths() == {self.ours.get_seq_length()} == {self.length}

    def lengths(self) -> set[int]:
        return {self.ours.index.length, *(each.get_seq_length() for each in self.ours.compressed)}

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
        if count < self.length - int((self.mask == 0).sum(1).max()) and not self.passing:
            self.mask, self.known = self.mask[:, :-count], self.known[:, :-count]
            for cache in (self.ours, self.theirs):
                remove(cache, count)

    @rule(order=st.lists(st.integers(0, MOST_SEQUENCES - 1), min_size=1, max_size=MOST_SEQUENCES))
    def select(self, order: list[int]) -> None:
        if self.family in RECURRENT:
            return
        indices = torch.tensor([i % self.batch for i in order])
        self.keep(indices)
        for cache in (self.ours, self.theirs):
            cache.batch_select_indices(indices)

    @rule(order=st.permutations(range(MOST_SEQUENCES)))
    def reorder(self, order: list[int]) -> None:
        indices = torch.tensor([i for i in order if i < self.batch])
        self.keep(indices)
        for cache in (self.ours, self.theirs):
            cache.reorder_cache(indices)

    @precondition(lambda self: self.batch <= MOST_SEQUENCES // 2 and self.family not in RECURRENT)
    @rule()
    def repeat(self) -> None:
        self.keep(torch.arange(self.batch).repeat_interleave(2))
        for cache in (self.ours, self.theirs):
            cache.batch_repeat_interleave(2)

    @rule(pads=st.lists(st.integers(0, 9), min_size=1, max_size=3), length=st.integers(10, 40))
    def reset(self, pads: list[int], length: int) -> None:
        self.ours.reset()
        self.theirs = self.fresh()
        self.start(len(pads), pads, length)

    @rule()
    def go_on_compiled(self) -> None:
        """Passes of our cache are compiled from now on, or no longer."""
        if self.family in NOT_COMPILED:
            return
        self.run = None if self.run is not None else compiled_of(self.model)

    @rule(count=st.integers(1, 20))
    def go_on_with_a_copy(self, count: int) -> None:
        """What is done with one of both leaves the other as it is."""
        other = copy.deepcopy(self.ours)
        if self.room(count):
            mask = torch.nn.functional.pad(self.mask, (0, count), value=1)
            self.logits(other, self.ids(self.batch, count), mask)
        self.ours, other = copy.deepcopy(self.ours), self.ours
        other.reset()

    @rule(
        count=st.integers(1, 30),
        layer=st.integers(0, 5),
        part=st.sampled_from(["self_attn", "mlp", "input_layernorm"]),
        kind=st.sampled_from(["error", "interruption", "NaN"]),
    )
    def fail(self, count: int, layer: int, part: str, kind: str) -> None:
        """A forward pass of the cache ends early; then it is as if it had not been."""
        layers = getattr(self.model.base_model, "layers", None)
        if self.run is not None or layers is None:
            return  # hooks of what is compiled do not run
        module = self.model.lm_head if layer >= len(layers) else getattr(layers[layer], part, None)
        if module is None or (kind == "NaN" and layer < len(layers) and not hasattr(layers[layer], "mlp")):
            return  # it goes by another name
        if kind == "NaN":
            if layer + 1 >= len(layers) or not self.above(layer):
                return  # nothing above keeps it
            module = layers[layer].mlp

        def poison(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * torch.nan

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt if kind == "interruption" else RuntimeError("no")

        handle = (
            module.register_forward_hook(poison) if kind == "NaN" else module.register_forward_pre_hook(stop)
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
        if kept and self.passing:
            self.reset([0], 12)
        elif kept:
            self.take_back(count)

    def take_back(self, count: int) -> None:
        remove(self.ours, count)

    @property
    def passing(self) -> bool:
        """Whether some layers keep no more than what is needed to go on: those do not go back."""
        sliding = any(getattr(layer, "is_sliding", False) for layer in self.ours.layers)
        return sliding or self.family in RECURRENT

    def above(self, layer: int) -> bool:
        return any(own.codec.view.index > layer for own in self.ours.compressed)


def compiled_of(model: Any) -> Any:
    if id(model) not in COMPILED:
        COMPILED[id(model)] = torch.compile(model, backend="eager", dynamic=True)
    return COMPILED[id(model)]

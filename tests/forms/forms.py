"""The forms in which tokens are held. Each is a way to come to a cache, or to run the model that goes on."""

import copy
import pickle
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.saved_caches import through_file
from xquant import KVCache, PrefixStore, StaticKVCache, compressed

ROOM = 320
"""Tokens of a static cache."""


@dataclass
class Held:
    """Tokens in one form, and the model that goes on with them."""

    model: Any
    spec: str
    stack: ExitStack
    """Of what ends with the test: folders, and blocks of `compressed`."""
    calls: Any = None
    """What is called in place of the model, where that is another: a compiled one."""
    cache: Any = None

    def __call__(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Logits of new tokens."""
        run = self.model if self.calls is None else self.calls
        logits: Tensor = run(ids, past_key_values=self.cache, use_cache=True, **inputs).logits
        return logits

    def folder(self) -> Path:
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))


Fill = Callable[[Held, Tensor, dict[str, Any]], None]


@dataclass(frozen=True)
class Form:
    """``fill`` reads first tokens in one forward pass, and leaves in `Held` what goes on with them."""

    name: str
    said: str
    fill: Fill

    def begin(self, model: Any, spec: str, stack: ExitStack, ids: Tensor, **inputs: Any) -> Held:
        held = Held(model, spec, stack)
        with torch.no_grad():
            self.fill(held, ids, inputs)
        return held


FORMS: dict[str, Form] = {}


def form(said: str) -> Callable[[Fill], Fill]:
    def add(fill: Fill) -> Fill:
        FORMS[fill.__name__] = Form(fill.__name__, said, fill)
        return fill

    return add


@form("`KVCache`")
def growing(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    held.cache = KVCache(held.model, held.spec)
    held(ids, **inputs)


@form("a copy")
def copied(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    growing(held, ids, inputs)
    held.cache = copy.deepcopy(held.cache)


@form("saved, loaded")
def loaded(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    growing(held, ids, inputs)
    held.cache = through_file(held.cache)


@form("pickled")
def pickled(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    growing(held, ids, inputs)
    held.cache = pickle.loads(pickle.dumps(held.cache)).load(held.model)


@form("converted")
def converted(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    spec, held.spec = held.spec, "full"
    growing(held, ids, inputs)
    held.cache, held.spec = held.cache.converted(spec), spec


@form("`PrefixStore`")
def stored(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    """A prefix from a folder; what follows it is read by the model."""
    growing(held, ids, inputs)
    store = PrefixStore(held.folder(), held.model, held.spec)
    store.put(held.cache, ids)
    alike = len(ids) > 1 and bool((ids == ids[:1]).all())
    longer = torch.cat([ids, ids[:, -1:]], 1)
    held.cache = store.get(longer[:1] if alike else longer)
    if alike:
        held.cache.batch_repeat_interleave(len(ids))
    start = held.cache.get_seq_length()
    whole = inputs.get("attention_mask")
    if start < ids.shape[1]:
        held(ids[:, start:], **({} if whole is None else {"attention_mask": whole}))


@form("`compressed()`")
def implicit(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    held.stack.enter_context(compressed(held.model, held.spec))
    held.cache = held.model(ids, use_cache=True, **inputs).past_key_values
    assert isinstance(held.cache, KVCache)


@form("compiled")
def compiled(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    _compile(held)
    growing(held, ids, inputs)


@form("`StaticKVCache`")
def static(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    held.cache = StaticKVCache(held.model, held.spec, ROOM)
    held(ids, **inputs)


@form("a copy of one")
def static_copied(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    static(held, ids, inputs)
    held.cache = copy.deepcopy(held.cache)


@form("one, compiled")
def static_compiled(held: Held, ids: Tensor, inputs: dict[str, Any]) -> None:
    _compile(held)
    static(held, ids, inputs)


def _compile(held: Held) -> None:
    """Graphs stay from test to test, where they fit; what is compiled too often is an error here, and not run
    uncompiled. Threads have settings of their own, so they are made at each call."""
    patch = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=256)
    held.calls = patch(torch.compile(held.model, backend="eager", dynamic=True).__call__)

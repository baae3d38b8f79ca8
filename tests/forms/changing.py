"""Promises: what is done with a cache between passes."""

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from support.generation import remove
from support.models import prompt, tiny
from xquant import KVCache, detach

from .forms import Form, Held
from .promise import LENGTH, SMALL, SPEC, begun, go_on, llama, promise, same, text, theirs


@promise("a copy and what it was copied from go on apart")
def copies(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    other = copy.copy(held)
    other.cache = copy.deepcopy(held.cache)
    with torch.no_grad():
        other(prompt(1, 40, seed=9))
    go_on(held, own, ids, 1, 30)
    assert other.cache.get_seq_length() == LENGTH + 40


@promise("`save` and `load`, and pickle")
def saving(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    go_on(held, own, ids, 2)
    held.cache = pickle.loads(pickle.dumps(held.cache)).load(held.model)
    go_on(held, own, ids, 1, 30)


@promise("`converted` to another method")
def conversion(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    held.cache = held.cache.converted("int16:group=32")
    go_on(held, own, ids, 1, 30)


@promise("`crop` of tokens that are at hand, and passes after it")
def crop(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    for _ in range(2):
        go_on(held, own, ids, 5)
        for each in (held, own):
            remove(each.cache, 3)
    go_on(held, own, ids, 16)  # a block ends in it
    for count in (1, 5):
        for each in (held, own):
            remove(each.cache, count)
    go_on(held, own, ids, 1, 30)


@promise("`crop` into blocks")
def crop_far(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    for each in (held, own):
        remove(each.cache, 70)
    go_on(held, own, ids, 1, 40, 1)


@torch.no_grad()
def _batch(held: Held, own: Held, change: Callable[[Any], None]) -> None:
    for each in (held, own):
        change(each.cache)
    size = own.cache.layers[0].keys.shape[0]
    for seed, count in enumerate((1, 30, 1)):
        more = prompt(size, count, seed=50 + seed)
        same(held(more), own(more))


@promise("`batch_repeat_interleave`")
def repeat(form: Form, stack: ExitStack) -> None:
    pair = begun(form, stack, llama(), text()[:, :LENGTH])
    _batch(*pair, lambda cache: cache.batch_repeat_interleave(2))


@promise("`batch_select_indices`")
def select(form: Form, stack: ExitStack) -> None:
    pair = begun(form, stack, llama(), text()[:, :LENGTH])
    _batch(*pair, lambda cache: cache.batch_repeat_interleave(3))
    _batch(*pair, lambda cache: cache.batch_select_indices(torch.tensor([2, 0])))


@promise("`reorder_cache`, as beam search does")
def reorder(form: Form, stack: ExitStack) -> None:
    pair = begun(form, stack, llama(), text()[:, :LENGTH])
    _batch(*pair, lambda cache: cache.batch_repeat_interleave(3))
    _batch(*pair, lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])))


@promise("`reset`, and another text")
def reset(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, _ = begun(form, stack, llama(), ids[:, :LENGTH])
    held.cache.reset()
    assert held.cache.get_seq_length() == 0
    own, other = theirs(held.model), prompt(1, 80, seed=8)
    go_on(held, own, other, 40, 1, 30)


@promise("`generate` gives the tokens of a cache of transformers")
def generation(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    asked = {"max_new_tokens": 12, "do_sample": False}
    got, want = (
        each.model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=each.cache, **asked)
        for each in (held, own)
    )
    assert torch.equal(got, want)


@promise("another model and another batch are refused by one line, and leave no trace")
def refusal(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    other = tiny("llama", **SMALL)
    stack.callback(detach, other)
    KVCache(other, SPEC)
    for _ in range(2):
        with pytest.raises(ValueError, match="another model"), torch.no_grad():
            other(ids[:, LENGTH : LENGTH + 1], past_key_values=held.cache)
        with pytest.raises(ValueError, match="batch"), torch.no_grad():
            held(prompt(2, 1))
    go_on(held, own, ids, 1, 20)

"""A forward pass that fails, or is interrupted, leaves the cache as it was: to the bit, for every method."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.caches import make_cache
from support.method_matrix import LOW
from support.models import prompt, tiny
from xquant import KVCache

START, STOP = 44, 61  # 17 tokens are no decode step, so that layers seal as they go
SPECS = [*LOW, "full:group=8", "xquant-16bit:group=8,form=gqa"]


@torch.inference_mode()
def run(model: Any, cache: KVCache, start: int, stop: int) -> Tensor:
    logits: Tensor = model(prompt(2, 100)[:, start:stop], past_key_values=cache).logits
    return logits


@contextmanager
def failing(module: nn.Module, error: BaseException) -> Iterator[None]:
    """``module`` raises when it is called."""

    def fail(*_: Any) -> None:
        raise error

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def lengths(cache: KVCache) -> set[int]:
    return {layer.get_seq_length() for layer in cache.layers} | {cache.index.length}


def check_unharmed(model: Any, cache: KVCache, other: KVCache) -> None:
    """Both go on alike, to the bit: by a prefill that seals, and decode steps."""
    for start, stop in ((START, STOP), (STOP, STOP + 1), (STOP + 1, STOP + 9)):
        assert torch.equal(run(model, cache, start, stop), run(model, other, start, stop))


def pair(model: Any, spec: str) -> tuple[KVCache, KVCache]:
    cache = make_cache(model, spec)
    run(model, cache, 0, START)
    return cache, copy.deepcopy(cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_prefill_that_fails_half_way_up(family: str, spec: str) -> None:
    model = tiny(family)
    cache, other = pair(model, spec)
    for layer, part in ((4, "self_attn"), (3, "mlp")):
        module = getattr(model.model.layers[layer], part)
        with failing(module, RuntimeError("no")), pytest.raises(RuntimeError, match="no"):
            run(model, cache, START, STOP)
        assert lengths(cache) == {START}
    check_unharmed(model, cache, other)


AFTER = {
    "the last layer's MLP": lambda model: model.model.layers[-1].mlp,
    "the last norm": lambda model: model.model.norm,
    "the head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("where", AFTER)
@pytest.mark.parametrize("stop", [STOP, START + 4])
def test_a_pass_that_fails_after_the_last_layer_was_stored(where: str, stop: int) -> None:
    model = tiny("llama")
    cache, other = pair(model, "xquant-cl-2bit:group=8,form=mha,sink=2")
    module = AFTER[where](model)
    with failing(module, RuntimeError("no")), pytest.raises(RuntimeError, match="no"):
        run(model, cache, START, stop)
    assert cache.get_seq_length() == START
    check_unharmed(model, cache, other)


def interrupt(model: Any, cache: KVCache, layer: int) -> None:
    with (
        failing(model.model.layers[layer].mlp, KeyboardInterrupt()),
        pytest.raises(KeyboardInterrupt),
    ):
        run(model, cache, START, STOP)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", ["kivi-2bit:group=8,sink=2", "tc-cl-1.5bit:group=16,sink=2"])
def test_an_interrupted_pass_is_undone_when_the_next_begins(family: str, spec: str) -> None:
    model = tiny(family)
    cache, other = pair(model, spec)
    for layer in (4, 0, 2):
        interrupt(model, cache, layer)
        assert cache.get_seq_length() == START == cache.report().tokens
    check_unharmed(model, cache, other)


NEXT: dict[str, Callable[[KVCache], Any]] = {
    "crop": lambda cache: cache.crop(-5),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("change", NEXT)
def test_an_interrupted_pass_is_undone_before_anything_else_is_done(change: str) -> None:
    model = tiny("llama")
    cache, other = pair(model, "kivi-2bit:group=8,sink=2")
    interrupt(model, cache, 2)
    for one in (cache, other):
        NEXT[change](one)
    assert lengths(cache) == lengths(other)
    ids = prompt(max(other.index.batch, 1), 20, seed=3)
    with torch.inference_mode():
        got, want = (model(ids, past_key_values=one).logits for one in (cache, other))
    assert torch.equal(got, want)


def test_copies_and_conversions_leave_out_an_interrupted_pass() -> None:
    model = tiny("llama")
    cache, other = pair(model, "kivi-2bit:group=8,sink=2")
    interrupt(model, cache, 2)
    check_unharmed(model, copy.deepcopy(cache), copy.deepcopy(other))
    interrupt(model, cache, 2)
    check_unharmed(model, cache.converted("full:group=8"), other.converted("full:group=8"))


class Breaking:
    """A function that raises ``kind`` from its call number ``after + 1`` on."""

    def __init__(self, function: Callable[..., Any], after: int, kind: type[BaseException]) -> None:
        self.function, self.left, self.kind = function, after, kind

    def __call__(self, *args: Any) -> Any:
        if self.left == 0:
            raise self.kind
        self.left -= 1
        return self.function(*args)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("spec", ["kvquant-2bit-5%:group=8,sink=2", "xquant-cl-3bit:group=8,form=gqa"])
def test_sealing_that_is_interrupted(spec: str, kind: type[BaseException]) -> None:
    """In the middle of a layer's blocks: what was added to some fields of a segment is taken off."""
    from xquant.past import stream

    model = tiny("llama")
    cache, other = pair(model, spec)
    for after in (0, 3, 10):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(kind):
            patch.setattr(stream, "_grown", Breaking(stream._grown, after, kind))
            run(model, cache, START, STOP)
        assert cache.get_seq_length() == START
    check_unharmed(model, cache, other)


def test_a_change_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    cache, other = pair(model, "kivi-2bit:group=8,sink=2")
    top = cache.compressed[3]
    monkeypatch.setattr(top, "batch_select_indices", lambda _: 1 / 0)
    monkeypatch.setattr(top, "crop", lambda _: 1 / 0)
    for change in ("crop", "select", "reorder", "repeat"):
        with pytest.raises(ZeroDivisionError):
            NEXT[change](cache)
        assert lengths(cache) == {START} and cache.index.batch == 2
    monkeypatch.undo()
    check_unharmed(model, cache, other)


class Interrupter:
    """Raises KeyboardInterrupt at call number ``at`` of anything in a model, as Ctrl-C would."""

    def __init__(self, model: nn.Module, at: int) -> None:
        self.left = at
        self.handles = [m.register_forward_pre_hook(self.count) for m in model.modules()]
        self.handles += [m.register_forward_hook(self.count) for m in model.modules()]

    def count(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", ["kivi-2bit:group=8,sink=2", "xquant-cl-2bit:group=8,form=mha"])
def test_a_generation_that_is_interrupted_goes_on_to_the_same_tokens(spec: str) -> None:
    model, ids = tiny("llama"), prompt(1, 30)
    options = {"max_new_tokens": 24, "do_sample": False}
    cache = make_cache(model, spec)
    want = model.generate(ids, past_key_values=cache, **options)
    calls = Interrupter(model, 0)
    model.generate(ids, past_key_values=make_cache(model, spec), **options)
    for handle in calls.handles:
        handle.remove()
    for tenth in range(10):
        cache, said = make_cache(model, spec), Listener()
        breaker = Interrupter(model, -calls.left * (2 * tenth + 1) // 20)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, past_key_values=cache, streamer=said, **options)
        for handle in breaker.handles:
            handle.remove()
        known = torch.tensor([said.tokens or ids[0].tolist()])
        ahead = cache.get_seq_length() - (known.shape[1] - 1)
        if ahead > 0:  # the newest token went in, and what follows it was not said
            cache.crop(-ahead)
        rest = {**options, "max_new_tokens": want.shape[1] - known.shape[1]}
        assert torch.equal(model.generate(known, past_key_values=cache, **rest), want)


class Listener:
    """A streamer that remembers what was generated before the interruption."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass

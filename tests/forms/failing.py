"""Promises: passes that fail, and what runs beside others."""

import gc
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.models import prompt, tiny
from xquant import decompress, detach

from .forms import Form
from .promise import LENGTH, SMALL, SPEC, begun, go_on, llama, promise, same, text


@torch.library.custom_op("xquant_tests::stumble", mutates_args=())
def stumble(x: Tensor) -> Tensor:
    """What it is given, or what `Stumbling.next` says: an operator, so that compiled layers do it too."""
    happens, Stumbling.next = Stumbling.next, None
    if happens is None:
        return x.clone()
    if isinstance(happens, BaseException):
        raise happens
    return x * happens


@stumble.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Stumbling(nn.Module):
    """An activation in the middle of a model, which fails once when it is told to."""

    next: BaseException | float | None = None

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.xquant_tests.stumble(self.activation(x))
        return out


def stumbling() -> Any:
    model = tiny("llama", **SMALL)
    model.model.layers[0].mlp.act_fn = Stumbling(model.model.layers[0].mlp.act_fn)
    return model


def _fails(form: Form, stack: ExitStack, happens: BaseException | float, said: str | None = None) -> None:
    ids, model = text(), stumbling()
    stack.callback(setattr, Stumbling, "next", None)
    held, own = begun(form, stack, model, ids[:, :LENGTH])
    go_on(held, own, ids, 3)
    for count in (1, 40):
        Stumbling.next = happens
        kind = type(happens) if isinstance(happens, BaseException) else ValueError
        with pytest.raises(kind, match=said), torch.no_grad():
            held(ids[:, LENGTH + 3 : LENGTH + 3 + count])
        assert held.cache.get_seq_length() == own.cache.get_seq_length()
    go_on(held, own, ids, 1, 40, 1)


@promise("a pass that fails leaves the cache as it was")
def failure(form: Form, stack: ExitStack) -> None:
    _fails(form, stack, RuntimeError("it fell"), "it fell")


@promise("so does a pass that Ctrl-C ends")
def interruption(form: Form, stack: ExitStack) -> None:
    _fails(form, stack, KeyboardInterrupt())


@promise("NaN is refused, and never held")
def nan(form: Form, stack: ExitStack) -> None:
    _fails(form, stack, torch.nan, "NaN or infinity")


@promise("threads share a model, each with a cache of its own")
def threads(form: Form, stack: ExitStack) -> None:
    model, texts = llama(), [prompt(1, LENGTH + 12, seed=seed) for seed in (1, 2, 3)]
    pairs = [begun(form, stack, model, ids[:, :LENGTH]) for ids in texts]
    found: list[BaseException | None] = [None] * 3

    def work(number: int) -> None:
        try:
            go_on(*pairs[number], texts[number], *[1] * 12)
        except BaseException as error:
            found[number] = error

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for error in found:
        if error is not None:
            raise error


@promise("inference mode may begin and end")
def inference(form: Form, stack: ExitStack) -> None:
    ids, model = text(), llama()
    with torch.inference_mode():
        held, own = begun(form, stack, model, ids[:, :LENGTH])
        same(held(ids[:, LENGTH : LENGTH + 5]), own(ids[:, LENGTH : LENGTH + 5]))
    go_on(held, own, ids, 1, 20)
    with torch.inference_mode():
        same(held(ids[:, LENGTH + 26 : LENGTH + 27]), own(ids[:, LENGTH + 26 : LENGTH + 27]))


@promise("outside `no_grad` logits are the same, and no wrong gradient is had")
def gradients(form: Form, stack: ExitStack) -> None:
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    logits = held(ids[:, LENGTH : LENGTH + 5])
    with torch.no_grad():
        same(logits.detach(), own(ids[:, LENGTH : LENGTH + 5]))
    with pytest.raises(RuntimeError, match="gradient"):
        logits.sum().backward()


@promise("a model and a cache that are not held elsewhere are freed")
def memory(form: Form, stack: ExitStack) -> None:
    ids, model = text(), tiny("llama", **SMALL)
    with ExitStack() as own:
        held = form.begin(model, SPEC, own, ids[:, :LENGTH])
        with torch.no_grad():
            held(ids[:, LENGTH : LENGTH + 1])
        cache = weakref.ref(held.cache)
        held.cache = None
        gc.collect()
        assert cache() is None, "something holds the cache"
    decompress(model)
    detach(model)
    seen = weakref.ref(model)
    del model, held
    gc.collect()
    assert seen() is None, "something holds the model"

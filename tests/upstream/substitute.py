"""A plugin of pytest: in transformers' own tests, a compressed cache is made where `generate`, or the model
itself, would make a DynamicCache.

It takes the method from ``XQUANT_METHOD``, with ``XQUANT_ROOM`` makes a `StaticKVCache` with room for so many
tokens, and leaves what it saw of every test in ``XQUANT_OUTCOMES``.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from xquant import Calibration, KVCache, StaticKVCache, attach, parse_method
from xquant.calibrators.run import calibrate_on
from xquant.codecs import fingerprint

METHOD, ROOM = parse_method(os.environ["XQUANT_METHOD"]), int(os.environ["XQUANT_ROOM"])
LEFT_OUT = {
    "_export_": "exports a model",
    "static_cache": "about StaticCache",
    "quant_cache": "about QuantizedCache",
    "compil": "compiles, which needs a StaticCache",
    "flash_attention|_fa[234]_": "needs flash attention",
    "model_parallel": "needs several devices",
    "recurrent_layers": "about layers that are not attention",
} | ({"beam": "reorders a batch, which a StaticKVCache does not"} if ROOM else {})
"""Patterns of names of tests that are not run, and why."""
CALIBRATED_ON = (4, 64)
"""Sequences and tokens that methods which need a calibration get one from."""

_outcomes: dict[str, dict[str, Any]] = {}
_made = 0
_calibrations: dict[str, Calibration] = {}


def calibration(model: Any) -> Calibration | None:
    """What `METHOD` needs to know of ``model``, from random tokens."""
    if not METHOD.needs_calibration:
        return None
    key = fingerprint(attach(model).view.compressed)
    if key not in _calibrations:
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        tokens = torch.randint(vocabulary, CALIBRATED_ON, generator=generator)
        with torch.random.fork_rng():
            _calibrations[key] = calibrate_on(model, tokens, METHOD)
    return _calibrations[key]


def ours(model: Any) -> KVCache | StaticKVCache:
    global _made
    made = calibration(model)
    cache = (
        StaticKVCache(model, METHOD, ROOM, calibration=made)
        if ROOM
        else KVCache(model, METHOD, calibration=made)
    )
    _made += 1
    return cache


_prepare = GenerationMixin._prepare_cache_for_generation


def prepare(self: Any, config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """What `generate` calls for a cache: a DynamicCache that was made there is replaced."""
    given = model_kwargs.get("past_key_values")
    result = _prepare(self, config, model_kwargs, *args, **kwargs)
    made = model_kwargs.get("past_key_values")
    if given is None and type(made) is DynamicCache and config.cache_implementation != "offloaded":
        model_kwargs["past_key_values"] = ours(self)
        if config.is_assistant:
            model_kwargs["past_key_values"].activate_past_recording()
    return result


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What runs a forward pass: where none is given and one is wanted, the model would make a cache."""
    if isinstance(self, GenerationMixin) and kwargs.get("past_key_values") is None:
        wanted = kwargs.get("use_cache")
        text = self.config.get_text_config(decoder=True)
        if text.use_cache if wanted is None else wanted:
            kwargs["past_key_values"] = ours(self)
    return nn.Module.__call__(self, *args, **kwargs)


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny models lose more time in handing work to threads than they gain
    GenerationMixin._prepare_cache_for_generation = prepare
    PreTrainedModel.__call__ = call


def _generates(item: Any) -> bool:
    """Whether a test is one of GenerationTesterMixin."""
    name = getattr(item.function, "__name__", "")  # a test may be another kind of callable
    classes = item.cls.__mro__ if item.cls is not None else ()
    return any(c.__name__ == "GenerationTesterMixin" and hasattr(c, name) for c in classes)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    kept, dropped = [], []
    for item in items:
        if not _generates(item):
            dropped.append(item)
        elif any(re.search(pattern, item.name) for pattern in LEFT_OUT):
            _outcomes[item.nodeid] = {"outcome": "left out"}
            dropped.append(item)
        else:
            kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    global _made
    _made = 0
    torch.manual_seed(0)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        found = {"outcome": report.outcome, "caches": _made}
        if report.failed:
            found["reason"] = crash.message.splitlines()[0] if crash else str(report.longrepr)[-200:]
        _outcomes[item.nodeid] = found
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ["XQUANT_OUTCOMES"]).write_text(json.dumps(_outcomes))

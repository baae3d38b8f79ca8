"""Caches of every method on tiny models: those that need a calibration get one, made once."""

from typing import Any

import torch
from torch import Tensor

from support.models import prompt
from xquant import Calibration, KVCache, attach, parse_method
from xquant.calibrators.run import calibrate_on
from xquant.codecs import fingerprint
from xquant.methods import Method

_MADE: dict[tuple[str, str], Calibration] = {}


def calibration(model: Any, method: str | Method) -> Calibration | None:
    """The calibration that ``method`` needs on ``model``, from a few random tokens."""
    method = parse_method(method)
    if not method.needs_calibration:
        return None
    key = fingerprint(attach(model).view.compressed), method.calibrated_as
    if key not in _MADE:
        _MADE[key] = calibrate_on(model, prompt(4, 64, seed=11), method)
    return _MADE[key]


def make_cache(model: Any, spec: str, attend: str = "chunk", kernel: str = "auto") -> KVCache:
    return KVCache(model, spec, attend, calibration(model, spec), kernel)


def rows_held(cache: KVCache) -> list[Tensor]:
    """Rotated keys and values ``[T, W]`` of every layer, of a cache with one sequence."""
    found = []
    for layer in cache.compressed:
        assert layer.keys is not None and layer.values is not None
        states = (part[0].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values))
        found.append(torch.cat([*states], -1))
    return found

"""Caches of every method on tiny models: those that need a calibration get one, made once."""

from typing import Any

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

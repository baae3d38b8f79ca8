"""Where artifacts of methods that calibrate themselves are kept: by method and by model, for all to use."""

import os
from pathlib import Path

from .artifact import Calibration

FOLDER = "XQUANT_CACHE"
"""The environment variable that names the folder; by default ``~/.cache/xquant``."""


def _file(method: str, model: str) -> Path:
    folder = os.environ.get(FOLDER) or Path.home() / ".cache" / "xquant"
    name = method.replace(":", "-").replace(",", "-")
    return Path(folder) / "calibrations" / f"{name}-{model[:32]}.safetensors"


def find(method: str, model: str) -> Calibration | None:
    """The artifact for the method of that spec and the model of that `fingerprint`, if there is one that this
    version can read."""
    try:
        found = Calibration.load(_file(method, model))
        found.check(method, model)
    except (OSError, ValueError):
        return None
    return found


def keep(calibration: Calibration) -> None:
    """Keep an artifact for later.

    Raises:
        OSError: the folder cannot be written to.
    """
    file = _file(calibration.method, calibration.model)
    file.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(file)

"""Where artifacts of methods that calibrate themselves are kept, and the texts that models write for them: by
method and by model, for all to use."""

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..files import write_atomically
from .artifact import Calibration

FOLDER = "XQUANT_CACHE"
"""The environment variable that names the folder; by default ``~/.cache/xquant``."""


def _file(name: str, model: str) -> Path:
    folder = os.environ.get(FOLDER) or Path.home() / ".cache" / "xquant"
    name = name.replace(":", "-").replace(",", "-")
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


def find_text(size: tuple[int, int], model: str) -> Tensor | None:
    """The text of ``size`` (tokens of a sample, samples) that this model wrote: token ids ``[N, T]``."""
    try:
        return load_file(_file(_text(size), model))["ids"]
    except (OSError, SafetensorError, KeyError):
        return None


def keep_text(ids: Tensor, model: str) -> None:
    """Keep a text ``[N, T]`` for the next method.

    Raises:
        OSError: the folder cannot be written to.
    """
    file = _file(_text((ids.shape[1], ids.shape[0])), model)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save({"ids": ids}))


def _text(size: tuple[int, int]) -> str:
    from .. import __version__

    return f"text-{__version__}-{size[1]}x{size[0]}"

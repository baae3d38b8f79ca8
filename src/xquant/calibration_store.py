"""The folder of artifacts of methods that calibrate themselves, and of the texts that models write for them.

Files are named by method and by model. Every process of the user finds them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from . import __version__
from .calibration import Calibration, Expected, check
from .files import cache_folder, write_atomically


def folder() -> Path:
    """Where artifacts and texts are kept."""
    return cache_folder() / "calibrations"


def unfinished() -> Path:
    """Where parts of texts are kept until all is written."""
    return folder() / "unfinished"


def _file(name: str, model: str) -> Path:
    name = name.replace(":", "-").replace(",", "-")
    return folder() / f"{name}-{model[:32]}.safetensors"


def find(method: str, model: str, expected: Mapping[str, Expected] | None = None) -> Calibration | None:
    """The stored calibration for a method and a model; None where there is none that this version can read.

    Args:
        method: the method's ``calibrated_as``.
        model: the model's `codecs.fingerprint`.
        expected: the tensors that it must hold.
    """
    return usable(_file(method, model), method, model, expected)


def usable(
    file: Path, method: str, model: str, expected: Mapping[str, Expected] | None = None
) -> Calibration | None:
    """`find` in a given file."""
    try:
        found = Calibration.load(file)
        found.check(method, model)
        if expected is not None:
            check(found.tensors, expected)
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


def find_text(size: tuple[int, int], model: str, words: int) -> Tensor | None:
    """The text of ``size`` (tokens of a sample, samples) that this model of ``words`` different tokens wrote:
    token ids ``[N, T]``."""
    ids = Expected((size[1], size[0]), torch.int64, 0, words - 1)
    try:
        found = load_file(_file(_text(size), model))
        check(found, {"ids": ids})
    except (OSError, SafetensorError, ValueError, AttributeError):
        return None
    return found["ids"]


def keep_text(ids: Tensor, model: str) -> None:
    """Keep a text ``[N, T]`` for the next method.

    Raises:
        OSError: the folder cannot be written to.
    """
    file = _file(_text((ids.shape[1], ids.shape[0])), model)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save({"ids": ids}))


def _text(size: tuple[int, int]) -> str:
    return f"text-{__version__}-{size[1]}x{size[0]}"

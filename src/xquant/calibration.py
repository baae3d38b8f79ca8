"""The calibration artifact: a safetensors file that says what it was made for, and the tensors that a method
expects of one. Methods and whatever calibrates them stand above this module."""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from . import __version__
from .files import write_atomically

_KIND = "xquant calibration"
_FACTS = ("method", "model", "text", "version")
_LONGEST = 400
"""Characters of a fact, at most."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What `xquant.calibrate` found for one method on one model; equal where all it holds is equal.

    ``tensors`` are named ``"<position of the compressed layer>.<what>"``.

    Examples:
        >>> from xquant import Calibration, KVCache, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "kvquant-3bit", text, context=64, windows=4)
        >>> found.save("kvquant.safetensors")
        >>> Calibration.load("kvquant.safetensors") == found
        True
        >>> cache = KVCache(model, "kvquant-3bit", calibration="kvquant.safetensors")
    """

    tensors: dict[str, Tensor]
    method: str
    """The spec calibrated for, options that do not matter to it left out."""
    model: str
    """`codecs.fingerprint` of the model."""
    text: str
    """What was read: a name, the SHA-256 of its tokens and their number."""
    version: str
    """Of xquant."""

    def __post_init__(self) -> None:
        for fact in _FACTS:
            held = getattr(self, fact)
            if not isinstance(held, str) or not 0 < len(held) <= _LONGEST:
                raise ValueError(f"'{fact}' of a calibration is a text of 1 to {_LONGEST} characters")
        try:
            Version(self.version)
        except InvalidVersion:
            raise ValueError(f"'{self.version[:40]}' is no version of xquant") from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all it holds."""
        digest = hashlib.sha256(repr([getattr(self, fact) for fact in _FACTS]).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {kind(tensor)}".encode())
            digest.update(tensor.cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def layer(self, position: int) -> dict[str, Tensor]:
        """The tensors of the compressed layer at ``position``, counted from the bottom."""
        start = f"{position}."
        found = {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact; the file appears whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        facts = {"kind": _KIND} | {fact: getattr(self, fact) for fact in _FACTS}
        tensors = {name: t.contiguous() for name, t in self.tensors.items()}
        write_atomically(Path(path), save(tensors, metadata=facts))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read an artifact.

        Raises:
            FileNotFoundError: there is none.
            ValueError: not an artifact, cut short, or written by a version that may mean other things.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there is no calibration file '{path}'")
        if path.is_dir():
            raise ValueError(f"'{path}' is a folder, not a calibration file")
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (
            SafetensorError,
            AttributeError,
        ) as error:  # the second: a dtype that this torch has not
            why = str(error)[:160]
            raise ValueError(f"'{path}' is damaged or no calibration file ({why})") from None
        if facts.get("kind") != _KIND or any(fact not in facts for fact in _FACTS):
            raise ValueError(f"'{path}' is a safetensors file, but not a calibration of xquant")
        try:
            found = cls(tensors=tensors, **{fact: facts[fact] for fact in _FACTS})
        except ValueError as error:
            raise ValueError(f"'{path}' is damaged or no calibration file ({error})") from None
        if Version(found.version).release[:2] != Version(__version__).release[:2]:
            raise ValueError(
                f"'{path}' was written by xquant {found.version}, this is {__version__}: calibrate again"
            )
        return found

    def check(self, method: str, model: str) -> None:
        """Raise ValueError unless this was made for the method of that spec and the model of that
        `codecs.fingerprint`."""
        if method != self.method:
            raise ValueError(f"the calibration is for {self.method}, not for {method}")
        if model != self.model:
            raise ValueError(
                "the calibration was made on another model: its key and value projections or key norms differ"
            )


@dataclass(frozen=True)
class Expected:
    """A tensor that a calibration must hold: its shape, its dtype and what its numbers must be.

    All numbers are finite, and from ``least`` to ``most``. ``rising``: along the first dimension no number
    is below the one before it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    least: float = -math.inf
    most: float = math.inf
    rising: bool = False

    def blank(self) -> Tensor:
        """A tensor of this shape and dtype, for planning: a vector of zeros, or a larger tensor on the meta
        device."""
        vector = len(self.shape) == 1
        make = torch.zeros if vector else torch.empty
        return make(self.shape, dtype=self.dtype, device="cpu" if vector else "meta")

    def fault(self, found: Tensor) -> str:
        """What is wrong with a tensor; empty where it fits. A tensor on the meta device has no numbers to
        check."""
        if found.dtype != self.dtype or found.shape != self.shape:
            return f"is {kind(found)}, not {kind(self)}"
        if found.is_meta or not found.numel():
            return ""
        low, high = (float(end) for end in found.aminmax())  # NaN is both
        if not (math.isfinite(low) and math.isfinite(high)):
            return "holds NaN or infinity"
        if low < self.least or high > self.most:
            return f"holds {low:g} to {high:g}, not {self.least:g} to {self.most:g}"
        if self.rising and bool((found[1:] < found[:-1]).any()):
            return "is not in rising order"
        return ""


def kind(tensor: Tensor | Expected) -> str:
    """Type and shape in words: ``float16 [2, 24]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Expected],
    advice: str = "calibrate again",
) -> None:
    """Raise ValueError unless ``tensors`` are those that are ``expected``, no more and no fewer. It names
    the first that is wrong, and gives the ``advice``."""
    for name, wanted in expected.items():
        if name not in tensors:
            raise ValueError(f"the calibration lacks '{name}' ({kind(wanted)}): {advice}")
        if fault := wanted.fault(tensors[name]):
            raise ValueError(f"'{name}' of the calibration {fault}: {advice}")
    for name in tensors:
        if name not in expected:
            raise ValueError(f"the calibration holds '{name[:80]}', which the method does not know: {advice}")
